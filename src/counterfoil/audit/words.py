"""Which words of a caption do less for its match than they usually do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from counterfoil.data.pairs import Split
from counterfoil.models.explain import explain
from counterfoil.models.model import Model
from counterfoil.models.word_spans import caption_words
from counterfoil.progress import Progress, Silent

SHRINK = 5.0
"""As many uses of a word as the mean over all words counts for, when saying what is usual."""


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
            word: (sum(values) + SHRINK * self.overall) / (len(values) + SHRINK)
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
