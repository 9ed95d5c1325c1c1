"""Scores of true and false captions, and the effects of the words of the false ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import without, words_of_tokens
from counterfoil.data.text.words import caption_words
from counterfoil.encoders import Encoded
from counterfoil.evaluation.words.cases import FoilCase
from counterfoil.models.explain import word_parts
from counterfoil.models.model import Model
from counterfoil.scoring.encode import encode_texts

Values = NDArray[np.float64]

IMAGE_BATCH = 32


@dataclass(frozen=True)
class WordScores:
    """For case ``cases[k]``: the scores of both captions, and an effect per word of the false one.

    Punctuation is left out. ``skipped`` says which images could not be read.
    """

    cases: list[FoilCase]
    true: Values
    false: Values
    effects: list[Values]
    method: str
    skipped: list[str]


@torch.inference_mode()
def measure_words(
    model: Model, split: Split, cases: Sequence[FoilCase], progress: Progress | None = None
) -> WordScores:
    """The word effects of one model on cases that lie image by image."""
    table = split.require_fragments()
    progress = progress or Silent()
    groups = [(i, list(group)) for i, group in groupby(cases, key=lambda case: case.image)]
    starts = range(0, len(groups), IMAGE_BATCH)
    found: list[_Measured] = []
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
                found += _measure(model, readable)
    if not found:
        raise DataError(f"split '{split.name}' has no readable image")
    return WordScores(
        cases=[one.case for one in found],
        true=np.array([one.true for one in found]),
        false=np.array([one.false for one in found]),
        effects=[one.effects for one in found],
        method="parts" if all(one.by_parts for one in found) else "leave-one-out",
        skipped=skipped,
    )


def average_words(scores: Sequence[WordScores]) -> WordScores:
    """An ensemble: mean scores, whose word effects are the mean of the models' effects."""
    first = scores[0]
    if any(one.cases != first.cases for one in scores):
        raise DataError("the models of an ensemble could not read the same images")
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
class _Measured:
    case: FoilCase
    true: float
    false: float
    effects: Values
    by_parts: bool


def _measure(model: Model, group: list[tuple[Fragments, list[FoilCase]]]) -> list[_Measured]:
    """The cases of a few images; every caption is scored with its own image only."""
    images = model.encode_images(pad_fragments([item for item, _ in group]).to(model.device))
    rows = [(row, case) for row, (_, own) in enumerate(group) for case in own]
    probe = encode_texts(model, [rows[0][1].foil])
    by_parts = word_parts(model, images[:1], probe) is not None
    texts = [
        [case.caption, case.foil, *([] if by_parts else _shortened(case.foil))] for _, case in rows
    ]
    encoded = encode_texts(model, [text for each in texts for text in each])
    found: list[_Measured] = []
    start = 0
    for (row, case), own in zip(rows, texts, strict=True):
        image, block = images[row : row + 1], encoded[start : start + len(own)]
        start += len(own)
        scores: Values = model.matcher(image, block)[0].double().cpu().numpy()
        if by_parts:
            effects = _effects_of_parts(model, image, block[1:2], case.foil)
        else:
            effects = scores[1] - scores[2:]
        found.append(_Measured(case, float(scores[0]), float(scores[1]), effects, by_parts))
    return found


def _shortened(caption: str) -> list[str]:
    """The caption without each of its words, punctuation apart."""
    return [without(caption, w) for w in caption_words(caption) if not w.is_punctuation]


def _effects_of_parts(model: Model, image: Encoded, text: Encoded, caption: str) -> Values:
    parts = word_parts(model, image, text)
    assert parts is not None  # noqa: S101 - the same matcher had parts for the first pair
    each = (parts.positive.double() + parts.negative.double()).cpu().numpy()
    words = caption_words(caption)
    effects = np.zeros(len(words))
    for place, owner in enumerate(words_of_tokens(model.text, caption, words)):
        if owner is not None:
            effects[owner] += each[place]
    return effects[[not word.is_punctuation for word in words]]
