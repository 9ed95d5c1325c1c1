"""Suspicion of a caption from three signs, each relative to what is usual in its split.

A sign becomes z, its robust standard deviations from the median of the split's captions. z becomes
evidence 1 / (1 + exp(c − z)), which is 0.5 at c deviations. The evidence of all signs becomes
suspicion 1 − Π (1 − evidence): each sign alone can make a caption suspicious, and weak signs add
up. Nothing is learned. A split without errors has few captions far from its median, so the share of
suspicious captions is meaningful.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.progress import Progress, Silent
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import caption_words
from counterfoil.models.explain import explain
from counterfoil.models.model import Model

Values = NDArray[np.float64]

CENTER, RIVAL_CENTER = 3.0, 4.0
"""The deviations c. Another image often scores higher if images are similar, so that sign needs one
deviation more. Chosen on the dev split of the scenes."""

MIN_NAMED_EVIDENCE = 0.2
"""Evidence from which a sign is named; at suspicion 0.5, one of three signs has it."""

SUSPICIOUS_FROM = 0.5
"""Suspicion from which a caption counts as suspicious in a summary."""

SIGNS = ("low-score", "other-image", "wrong-words")
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

    def z(self, values: Values) -> Values:
        """Deviations from the median; 0 if all values are equal."""
        return (values - self.median) / self.spread if self.spread else np.zeros_like(values)


def evidence(z: Values, center: float = CENTER) -> Values:
    """Near 0 for usual values, 0.5 at ``center`` deviations, towards 1 beyond."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(center - z, -50.0, 700.0))))


def combine(signs: Values) -> Values:
    """Suspicion [n] from evidence [n, signs]."""
    return np.asarray(1.0 - np.prod(1.0 - signs, axis=1))


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


def measure_effects(
    model: Model, split: Split, captions: Sequence[int], progress: Progress | None = None
) -> WordEffects:
    """Effects of the words of captions on the score with their own image.

    They are the matcher's own parts if it has any, else come from leaving out one word at a time.
    """
    table = split.require_fragments()
    progress = progress or Silent()
    effects: dict[int, list[CaptionWord]] = {}
    method = ""
    for caption in progress.track(captions, f"word effects ({split.name})", len(captions)):
        text = split.texts[caption]
        if not caption_words(text):
            effects[caption] = []
            continue
        match = explain(model, table.read(int(split.image_of[caption])), text)
        method = match.method
        effects[caption] = [
            CaptionWord(each.word, each.span, each.effect, each.known)
            for each in match.words
            if each.span is not None and not each.is_punctuation
        ]
    return WordEffects(effects, method)


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
