"""How suspicious a caption is: three signs, each measured against what is usual in its split.

A sign is turned into a number z of robust standard deviations from the median of the split's
captions, z into evidence 1 / (1 + exp(c − z)), which is a half at c deviations, and the evidence of
all signs into one number, 1 − Π (1 − evidence): each sign alone can make a caption suspicious, and
weak signs add up. Nothing is learned, and a split without errors has few captions far from its
median, so that the share of suspicious ones means something.
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
"""The deviations c. Where images are alike, another one is often ahead of the right one: that sign
asks for one deviation more. Chosen on the dev split of the scenes."""

MIN_NAMED_EVIDENCE = 0.2
"""Evidence from which a sign is named: with three signs, suspicion 0.5 has at least one such."""

SUSPICIOUS_FROM = 0.5
"""Suspicion from which a caption counts as suspicious in a summary, whatever is listed."""

SIGNS = ("low-score", "other-image", "wrong-words")
TO_NORMAL = 1.4826
"""Median absolute deviations to standard deviations, where values are normal."""

SHRINKAGE_COUNT = 5.0
"""As many uses of a word as the mean over all words counts for, when saying what is usual."""


@dataclass(frozen=True)
class Scale:
    """The median of some values and their robust deviation."""

    middle: float
    spread: float

    @classmethod
    def of(cls, values: Values) -> Scale:
        """Of at least one finite value; where most are equal, the standard deviation stands in."""
        middle = float(np.median(values))
        spread = TO_NORMAL * float(np.median(np.abs(values - middle)))
        return cls(middle, spread or float(np.std(values)))

    def z(self, values: Values) -> Values:
        """Deviations from the middle; 0 everywhere where nothing varies."""
        return (values - self.middle) / self.spread if self.spread else np.zeros_like(values)


def evidence(z: Values, center: float = CENTER) -> Values:
    """0 for what is usual, a half at ``center`` deviations, towards 1 beyond."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(center - z, -50.0, 700.0))))


def combine(signs: Values) -> Values:
    """Suspicion [n] from evidence [n, signs]."""
    return np.asarray(1.0 - np.prod(1.0 - signs, axis=1))


def named_signs(signs: Values) -> list[int]:
    """Places in `SIGNS` of the reasons for suspecting one caption, the strongest first.

    Those with enough evidence to be named; if there are none, the strongest.
    """
    named = [int(k) for k in np.argsort(-signs, kind="stable") if signs[k] >= MIN_NAMED_EVIDENCE]
    return named or [int(signs.argmax())]


# Words that do less for a match than they usually do.


@dataclass(frozen=True)
class SpokenWord:
    """A word of a caption, where it stands, and its effect on the score."""

    word: str
    span: tuple[int, int]
    effect: float
    known: bool = True


@dataclass(frozen=True)
class WordEffects:
    """The words, punctuation left out, of those captions that were looked at, by their numbers."""

    words: dict[int, list[SpokenWord]]
    method: str


def measure_effects(
    model: Model, split: Split, captions: Sequence[int], progress: Progress | None = None
) -> WordEffects:
    """Effects of the words of some captions on the match with their own image.

    By the matcher's own parts where it has any, else by leaving out one word at a time.
    """
    table = split.require_fragments()
    progress = progress or Silent()
    found: dict[int, list[SpokenWord]] = {}
    method = ""
    for caption in progress.track(captions, f"word effects ({split.name})", len(captions)):
        text = split.texts[caption]
        if not caption_words(text):
            found[caption] = []
            continue
        match = explain(model, table.read(int(split.image_of[caption])), text)
        method = match.method
        found[caption] = [
            SpokenWord(each.word, each.span, each.effect, each.known)
            for each in match.words
            if each.span is not None and not each.is_punctuation
        ]
    return WordEffects(found, method)


class UsualEffects:
    """What a word usually adds to the score of a caption that has it.

    The mean over the captions given, drawn towards the median of all words where a word is rare:
    articles never do much, nouns mostly do, and only a word that does less than it usually does
    speaks against its caption.
    """

    def __init__(self, captions: Iterable[Sequence[SpokenWord]]) -> None:
        effects: dict[str, list[float]] = defaultdict(list)
        for spoken in captions:
            for each in spoken:
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

    def shortfall(self, spoken: SpokenWord) -> float:
        """How far a word's effect lies below what is usual for it; 0 for an unknown word."""
        return self.of(spoken.word) - spoken.effect if spoken.known else 0.0

    def worst(self, spoken: Sequence[SpokenWord]) -> float:
        """The largest shortfall of a caption; 0 where there are no words."""
        return max((self.shortfall(each) for each in spoken if each.known), default=0.0)
