"""Scores of true and false captions, and the effects of the words of the false ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.evaluation.ranks import Values
from counterfoil.evaluation.words.cases import FoilCase
from counterfoil.evaluation.words.doubts import is_spoken, may_be_wrong
from counterfoil.models.match import Method
from counterfoil.models.model import Model
from counterfoil.models.word_effects import default_method, variant_scores, word_effects

IMAGE_BATCH = 32


@dataclass(frozen=True)
class WordScores:
    """For case ``cases[k]``: the scores of both captions, and the effects of the false one's words.

    Punctuation has no effects. ``skipped`` lists unreadable images.
    """

    cases: list[FoilCase]
    true: Values
    false: Values
    effects: list[Values]
    method: str
    skipped: list[str]


@torch.inference_mode()
def measure_words(
    model: Model,
    split: Split,
    cases: Sequence[FoilCase],
    progress: Progress | None = None,
    method: Method | None = None,
) -> WordScores:
    """Scores and word effects of one model on cases sorted by image.

    The default ``method`` is that of `explain`: the one that was best on dev, if that was
    measured. Parts are taken where the matcher has them, leave-one-out elsewhere.
    """
    table = model.fragments_of(split)
    progress = progress or Silent()
    groups = [(i, list(group)) for i, group in groupby(cases, key=lambda case: case.image)]
    starts = range(0, len(groups), IMAGE_BATCH)
    results: list[_CaseResult] = []
    skipped: list[str] = []
    with eval_mode(model):
        for start in progress.track(starts, f"word effects ({model.spec.name})", len(starts)):
            readable: list[tuple[Fragments, list[FoilCase]]] = []
            for image, group in groups[start : start + IMAGE_BATCH]:
                try:
                    readable.append((table.read(image), group))
                except DataError as error:
                    skipped.append(f"image {split.ids[image]}: {error}")
            if readable:
                fragments = pad_fragments([item for item, _ in readable]).to(model.device)
                images = model.encode_images(fragments)
                method = method or _method_of(model, images, readable[0][1][0])
                results += _measure(model, images, [own for _, own in readable], method)
    if not results:
        raise DataError(f"split '{split.name}' has no readable image")
    return WordScores(
        cases=[one.case for one in results],
        true=np.array([one.true for one in results]),
        false=np.array([one.false for one in results]),
        effects=[one.effects for one in results],
        method=str(method),
        skipped=skipped,
    )


def _method_of(model: Model, images: Encoded, case: FoilCase) -> Method:
    return default_method(model, images[:1], case.foil)


def sign_accuracy(cases: Sequence[FoilCase], effects: Sequence[Values]) -> float:
    """How many wrong words have an effect below 0, and how many others none: the mean of both.

    Of the others, those count that could make a caption false. NaN if there are none of a kind, or
    if effects are not finite.
    """
    values = np.concatenate(effects)
    wrong = np.concatenate([case.labels for case in cases])
    others = np.concatenate([may_be_wrong(case.foil) for case in cases]) & ~wrong
    if not (np.isfinite(values).all() and wrong.any() and others.any()):
        return float("nan")
    return float(np.mean(values[wrong] < 0) + np.mean(values[others] >= 0)) / 2


def average_words(scores: Sequence[WordScores]) -> WordScores:
    """The mean scores and mean word effects of an ensemble."""
    first = scores[0]
    if any(one.cases != first.cases for one in scores):
        raise DataError(
            "the models of an ensemble read different images; their features must match"
        )
    methods = sorted({one.method for one in scores})
    return WordScores(
        cases=first.cases,
        true=np.mean([one.true for one in scores], axis=0),
        false=np.mean([one.false for one in scores], axis=0),
        effects=[np.mean(each, axis=0) for each in zip(*(s.effects for s in scores), strict=True)],
        method=" and ".join(methods),
        skipped=first.skipped,
    )


@dataclass(frozen=True)
class _CaseResult:
    case: FoilCase
    true: float
    false: float
    effects: Values


def _measure(
    model: Model, images: Encoded, cases: Sequence[Sequence[FoilCase]], method: Method
) -> list[_CaseResult]:
    """Results of the cases of a few images; each caption is scored with its own image only."""
    rows = [(row, case) for row, own in enumerate(cases) for case in own]
    index = torch.tensor([row for row, _ in rows], device=model.device)
    own_images = images[index]
    encode = model.text.encode
    ids = [[encode(case.caption), encode(case.foil)] for _, case in rows]
    scores = variant_scores(model, own_images, ids)
    effects = word_effects(model, own_images, [case.foil for _, case in rows], method)
    return [
        _CaseResult(case, float(both[0]), float(both[1]), each[is_spoken(case.foil)])
        for (_, case), both, each in zip(rows, scores, effects, strict=True)
    ]
