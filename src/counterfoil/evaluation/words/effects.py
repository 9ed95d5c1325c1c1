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
from counterfoil.data.text.tokenizers import without, words_of_tokens
from counterfoil.data.text.words import caption_words
from counterfoil.encoders import Encoded
from counterfoil.evaluation.ranks import Values
from counterfoil.evaluation.words.cases import FoilCase
from counterfoil.models.explain import word_parts
from counterfoil.models.match import Method
from counterfoil.models.model import Model
from counterfoil.scoring.encode import encode_texts

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

    The default ``method`` is that of `explain`: the one that was better on dev, if that was
    measured. Parts are taken where the matcher has them, leave-one-out elsewhere.
    """
    if method is None and model.yardstick is not None:
        method = model.yardstick.word_method
    table = split.require_fragments()
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
                results += _measure(model, readable, method)
    if not results:
        raise DataError(f"split '{split.name}' has no readable image")
    return WordScores(
        cases=[one.case for one in results],
        true=np.array([one.true for one in results]),
        false=np.array([one.false for one in results]),
        effects=[one.effects for one in results],
        method="parts" if all(one.by_parts for one in results) else "leave-one-out",
        skipped=skipped,
    )


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
    by_parts: bool


def _measure(
    model: Model, group: list[tuple[Fragments, list[FoilCase]]], method: Method | None
) -> list[_CaseResult]:
    """Results of the cases of a few images; each caption is scored with its own image only."""
    images = model.encode_images(pad_fragments([item for item, _ in group]).to(model.device))
    rows = [(row, case) for row, (_, own) in enumerate(group) for case in own]
    probe = encode_texts(model, [rows[0][1].foil])
    by_parts = method != "leave-one-out" and word_parts(model, images[:1], probe) is not None
    texts = [
        [case.caption, case.foil, *([] if by_parts else _leave_one_out(case.foil))]
        for _, case in rows
    ]
    encoded = encode_texts(model, [text for each in texts for text in each])
    results: list[_CaseResult] = []
    start = 0
    for (row, case), own in zip(rows, texts, strict=True):
        image, block = images[row : row + 1], encoded[start : start + len(own)]
        start += len(own)
        scores: Values = model.matcher(image, block)[0].double().cpu().numpy()
        if by_parts:
            effects = _effects_of_parts(model, image, block[1:2], case.foil)
        else:
            effects = scores[1] - scores[2:]
        results.append(_CaseResult(case, float(scores[0]), float(scores[1]), effects, by_parts))
    return results


def _leave_one_out(caption: str) -> list[str]:
    """The caption without each one of its words in turn; punctuation stays."""
    return [without(caption, w) for w in caption_words(caption) if not w.is_punctuation]


def _effects_of_parts(model: Model, image: Encoded, text: Encoded, caption: str) -> Values:
    parts = word_parts(model, image, text)
    assert parts is not None  # noqa: S101 - the same matcher had parts for the first pair
    each = (parts.positive.double() + parts.negative.double()).cpu().numpy()
    words = caption_words(caption)
    effects = np.zeros(len(words))
    for token, owner in enumerate(words_of_tokens(model.text, caption, words)):
        if owner is not None:
            effects[owner] += each[token]
    return effects[[not word.is_punctuation for word in words]]
