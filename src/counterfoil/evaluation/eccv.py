"""ECCV Caption (Chun et al. 2022, arXiv:2204.03359) through its own package, where installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from counterfoil.errors import DataError, MissingExtraError
from counterfoil.evaluation.cxc import Id, trailing_number
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.matrices import ScoreMatrix, check_matrix
from counterfoil.evaluation.positives import Positives
from counterfoil.evaluation.topk import top_k, transposed

Retrieved = dict[int, list[int]]

METRICS = ("eccv_map_at_r", "eccv_rprecision", "eccv_r1", "coco_5k_recalls", "cxc_recalls")


def retrieved_items(
    scores: ScoreMatrix, image_ids: Sequence[Id], text_ids: Sequence[Id], *, k: int
) -> tuple[Retrieved, Retrieved]:
    """The ids of the ``k`` best answers of each query, both ways, as the package wants them.

    >>> import numpy as np
    >>> retrieved_items(np.array([[0.1, 0.9]]), ["7"], ["40", "41"], k=1)
    ({7: [41]}, {40: [7], 41: [7]})
    """
    images = [trailing_number(identifier) for identifier in image_ids]
    texts = [trailing_number(identifier) for identifier in text_ids]
    if check_matrix(scores) != (len(images), len(texts)):
        raise DataError(
            f"scores of shape {tuple(scores.shape)}, but {len(images)} image ids "
            f"and {len(texts)} text ids"
        )
    best_texts, best_images = top_k(scores, k), top_k(transposed(scores), k)
    i2t = {
        image: [texts[text] for text in row] for image, row in zip(images, best_texts, strict=True)
    }
    t2i = {
        text: [images[image] for image in row] for text, row in zip(texts, best_images, strict=True)
    }
    return i2t, t2i


def eccv_caption_metrics(
    scores: ScoreMatrix,
    image_ids: Sequence[Id],
    text_ids: Sequence[Id],
    *,
    metrics: Sequence[str] = METRICS,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, dict[str, float]]:
    """The package's own metrics (fractions) of scores over the whole COCO 5K test split.

    Only as many answers are handed over as the longest list of positives needs. COCO 1K, which
    needs complete rankings there, is `retrieval` with ``protocol="folds"`` here.
    """
    if any(name.startswith("coco_1k") for name in metrics):
        raise DataError("COCO 1K needs complete rankings: use retrieval(…, protocol='folds')")
    judge = _judge()
    lists = [judge.coco_gts, judge.cxc_gts, judge.eccv_gts]
    longest = max(len(right) for gts in lists for side in gts.values() for right in side.values())
    i2t, t2i = retrieved_items(scores, image_ids, text_ids, k=max(longest, *ks))
    found: Mapping[str, Mapping[str, float]] = judge.compute_all_metrics(
        i2t, t2i, target_metrics=tuple(metrics), Ks=tuple(ks), verbose=False
    )
    return {
        name: {side: float(value) for side, value in sides.items()} for name, sides in found.items()
    }


def eccv_positives(image_ids: Sequence[Id], text_ids: Sequence[Id]) -> ExtendedPositives:
    """The package's positives, for `extended_metrics`; its queries are a part of the 5K."""
    judge = _judge()
    images = {trailing_number(identifier): place for place, identifier in enumerate(image_ids)}
    texts = {trailing_number(identifier): place for place, identifier in enumerate(text_ids)}
    return ExtendedPositives(
        _located(judge.eccv_gts["i2t"], images, texts),
        _located(judge.eccv_gts["t2i"], texts, images),
        source="ECCV Caption",
    )


def _located(
    right: Mapping[int, Sequence[int]], queries: Mapping[int, int], targets: Mapping[int, int]
) -> Positives:
    pairs = [
        (queries[query], targets[target])
        for query, found in right.items()
        for target in found
        if query in queries and target in targets
    ]
    return Positives.from_pairs(pairs, len(queries), len(targets))


def _judge() -> Any:
    try:
        package = importlib.import_module("eccv_caption")
    except ImportError as error:
        raise MissingExtraError("eccv_caption", "eccv", "ECCV Caption evaluation") from error
    return package.Metrics()
