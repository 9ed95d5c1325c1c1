"""Suspicion of a caption from five signs, each relative to what is usual in its split.

A sign becomes z, its robust standard deviations from the median of the split's captions. The
weighted sum of these, in deviations of the usual captions, becomes suspicion 1 / (1 + exp(c − z)),
which is 0.5 at c deviations. The same formula for each sign alone gives its evidence, which names
reasons. Nothing is learned; the few constants were chosen on dev splits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import KnownText, require_known, without
from counterfoil.data.text.words import CaptionWord as TextWord
from counterfoil.data.text.words import caption_words
from counterfoil.encoders import Encoded
from counterfoil.models.explain import merge_parts, word_parts
from counterfoil.models.model import Model
from counterfoil.scoring.encode import encode_texts

Values = NDArray[np.float64]

CENTER, WHOLE_CENTER = 3.0, 3.5
CENTERS = {"other-image": 4.0, "other-caption": 4.0}
"""The deviations c of a sign and of their sum. Another image or caption often scores higher if some
are similar, so these signs need one deviation more. Chosen on the dev split of the scenes."""

MIN_NAMED_EVIDENCE = 0.2
"""Evidence from which a sign is named as a reason."""

SUSPICIOUS_FROM = 0.5
"""Suspicion from which a caption counts as suspicious in a summary."""

SIGNS = ("low-score", "other-image", "other-caption", "neighbors", "wrong-words")
WORDS = SIGNS.index("wrong-words")

WEIGHTS = {
    "low-score": 0.0,
    "other-image": 0.5,
    "other-caption": 1.0,
    "neighbors": 0.75,
    "wrong-words": 0.4,
}
"""Weights of the deviations, chosen on the dev splits of the scenes (scenes-naaf) and of Flickr8k
(photos-vse) with noise of other seeds. Both leads contain the score, so it has none of its own."""

TO_NORMAL = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""

SHRINKAGE_COUNT = 5.0
"""Weight, in uses of a word, of the overall median in a word's usual effect."""


@dataclass(frozen=True)
class Scale:
    """The median and the robust deviation of values."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Values) -> Scale:
        """From at least one finite value; uses the standard deviation if most are equal."""
        median = float(np.median(values))
        spread = TO_NORMAL * float(np.median(np.abs(values - median)))
        return cls(median, spread or float(np.std(values)))

    @classmethod
    def of_usual(cls, values: Values) -> Scale:
        """Of the usual values, if many others are larger: up to nearly half of them.

        The center is the median of the shortest half, the deviation that of the values below it.
        """
        ranked = np.sort(values)
        half = (len(ranked) + 1) // 2
        first = int(np.argmin(ranked[half - 1 :] - ranked[: len(ranked) - half + 1]))
        center = float(np.median(ranked[first : first + half]))
        below = center - ranked[ranked < center]
        spread = TO_NORMAL * float(np.median(below)) if len(below) else 0.0
        return cls(center, spread) if spread else cls.of(values)

    def z(self, values: Values) -> Values:
        """Deviations from the median; 0 if all values are equal."""
        return (values - self.median) / self.spread if self.spread else np.zeros_like(values)


def deviations_of(values: Values) -> Values:
    """Robust deviations from the median; NaN stays, and does not count."""
    known = ~np.isnan(values)
    z = np.full(len(values), np.nan)
    if known.any():
        z[known] = Scale.of(values[known]).z(values[known])
    return z


def evidence(z: Values, center: float = CENTER) -> Values:
    """Near 0 for usual values, 0.5 at ``center`` deviations, towards 1 beyond."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(center - z, -50.0, 700.0))))


def combine(deviations: Values) -> Values:
    """Suspicion [n] from the deviations [n, signs] of captions; NaN is a sign without evidence."""
    weights = np.array([WEIGHTS[sign] for sign in SIGNS])
    whole = np.nan_to_num(deviations, nan=0.0) @ weights
    return evidence(Scale.of_usual(whole).z(whole), WHOLE_CENTER)


def named_signs(signs: Values) -> list[int]:
    """Indices into `SIGNS` of the reasons to suspect a caption, the strongest first.

    Signs with enough evidence; if there are none, the strongest.
    """
    named = [int(k) for k in np.argsort(-signs, kind="stable") if signs[k] >= MIN_NAMED_EVIDENCE]
    return named or [int(signs.argmax())]


@dataclass(frozen=True)
class CaptionWord:
    """A word of a caption, its position, and its effect on the score."""

    word: str
    span: tuple[int, int]
    effect: float
    known: bool = True


@dataclass(frozen=True)
class WordEffects:
    """The words without punctuation of the examined captions, by caption."""

    words: dict[int, list[CaptionWord]]
    method: str


EFFECT_BATCH = 64
"""Captions whose words are examined at once."""


@torch.inference_mode()
def measure_effects(
    model: Model, split: Split, captions: Sequence[int], progress: Progress | None = None
) -> WordEffects:
    """Effects of the words of captions on the score with their own image, as `explain` has them.

    They are the matcher's own parts if it has any, else come from leaving out one word at a time.
    """
    progress = progress or Silent()
    starts = range(0, len(captions), EFFECT_BATCH)
    blocks = [captions[start : start + EFFECT_BATCH] for start in starts]
    effects: dict[int, list[CaptionWord]] = {}
    method = ""
    with eval_mode(model):
        for block in progress.track(blocks, f"word effects ({split.name})", len(blocks)):
            spoken = [number for number in block if caption_words(split.texts[number])]
            effects.update((number, []) for number in block)
            if spoken:
                method, words = _block_effects(model, split, spoken)
                effects.update(zip(spoken, words, strict=True))
    return WordEffects(effects, method)


def _block_effects(
    model: Model, split: Split, captions: Sequence[int]
) -> tuple[str, list[list[CaptionWord]]]:
    """The method, and the words of each caption; images and texts are encoded in batches."""
    table = split.require_fragments()
    images = sorted({int(split.image_of[number]) for number in captions})
    row_of = {image: row for row, image in enumerate(images)}
    fragments = [table.read(image) for image in images]
    encoded = model.encode_images(pad_fragments(fragments).to(model.device))
    rows = [row_of[int(split.image_of[number])] for number in captions]
    reads = [require_known(model.text, split.texts[number]) for number in captions]
    texts = encode_texts(model, [read.text for read in reads])
    first = word_parts(model, encoded[rows[0] : rows[0] + 1], texts[:1])
    measured = model.yardstick.word_method if model.yardstick is not None else None
    if first is None or measured == "leave-one-out":
        return "leave-one-out", _left_out(model, encoded, rows, reads)
    words = []
    for number, (row, read) in enumerate(zip(rows, reads, strict=True)):
        parts = word_parts(model, encoded[row : row + 1], texts[number : number + 1])
        assert parts is not None  # noqa: S101 - the same matcher had parts for the first pair
        known = caption_words(read.text)
        merged, _ = merge_parts(model, read.text, known, parts)
        words.append(_caption_words(read, known, [each.effect for each in merged]))
    return "parts", words


def _left_out(
    model: Model, images: Encoded, rows: list[int], reads: list[KnownText]
) -> list[list[CaptionWord]]:
    known = [caption_words(read.text) for read in reads]
    texts = [
        [read.text, *(without(read.text, word) for word in words)]
        for read, words in zip(reads, known, strict=True)
    ]
    encoded = encode_texts(model, [text for each in texts for text in each])
    result, start = [], 0
    for row, read, words in zip(rows, reads, known, strict=True):
        block = encoded[start : start + 1 + len(words)]
        start += len(block)
        scores = model.matcher(images[row : row + 1], block)[0].double().cpu().tolist()
        effects = [scores[0] - score for score in scores[1:]]
        result.append(_caption_words(read, words, effects))
    return result


def _caption_words(
    read: KnownText, known: Sequence[TextWord], effects: Sequence[float]
) -> list[CaptionWord]:
    """Known words with their effects and unknown words without, in order, punctuation left out."""
    spoken = [
        CaptionWord(word.text, (word.start, word.end), effect)
        for word, effect in zip(known, effects, strict=True)
        if not word.is_punctuation
    ]
    unknown = [
        CaptionWord(word.text, (word.start, word.end), 0.0, known=False)
        for word in read.unknown
        if not word.is_punctuation
    ]
    return sorted([*spoken, *unknown], key=lambda each: each.span)


class UsualEffects:
    """The usual effect of each word on the score of a caption.

    It is the mean over the given captions, shrunk towards the median of all words for rare words.
    Articles never have much effect and nouns usually do, so only a word below its own usual effect
    speaks against its caption.
    """

    def __init__(self, captions: Iterable[Sequence[CaptionWord]]) -> None:
        effects: dict[str, list[float]] = defaultdict(list)
        for words in captions:
            for each in words:
                if each.known:
                    effects[each.word.lower()].append(each.effect)
        every = [effect for values in effects.values() for effect in values]
        self.overall = float(np.median(every)) if every else 0.0
        self.usual = {
            word: (sum(values) + SHRINKAGE_COUNT * self.overall) / (len(values) + SHRINKAGE_COUNT)
            for word, values in effects.items()
        }

    def of(self, word: str) -> float:
        return self.usual.get(word.lower(), self.overall)

    def shortfall(self, word: CaptionWord) -> float:
        """Usual effect of a word minus its effect here; 0 for an unknown word."""
        return self.of(word.word) - word.effect if word.known else 0.0

    def worst(self, words: Sequence[CaptionWord]) -> float:
        """The largest shortfall of a caption's words; 0 without known words."""
        return max((self.shortfall(each) for each in words if each.known), default=0.0)
