"""Positives of ECCV Caption (Chun et al. 2022, arXiv:2204.03359), from its own package."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from counterfoil.errors import MissingExtraError
from counterfoil.evaluation.cxc import Id, trailing_number
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.positives import Positives


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
