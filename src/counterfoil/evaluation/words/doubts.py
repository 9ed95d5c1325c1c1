"""Doubt about the words of a caption: less effect than usual, and unlikely beside the others.

A word's effect on the score is compared with the usual effect of the same word in other captions:
articles never do much for a match, nouns usually do. A caption language model, which sees no image,
adds how surprising the word is among the others. Words that say nothing about an image, such as
articles and auxiliaries, are never in doubt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.progress import Progress, Silent
from counterfoil.data.text.words import caption_words, words
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.ranks import Values
from counterfoil.foils.grammar import tag
from counterfoil.foils.lexicon import (
    AUXILIARY,
    CONJUNCTION,
    DETERMINER,
    POSSESSIVE,
    PRONOUN,
    TO,
)

NEVER_WRONG = frozenset({DETERMINER, AUXILIARY, CONJUNCTION, PRONOUN, POSSESSIVE, TO})
"""Word classes that say nothing about an image: exchanging them does not make a caption false."""

NO_DOUBT = -10.0
"""Doubt of a word that is never wrong: below that of all others, and finite."""

SURPRISE_WEIGHT = 0.5
"""Deviations of doubt per nat of surprise; `compare_methods` tries others on a dev split."""

SHRINKAGE_COUNT = 5.0
"""Weight, in uses of a word, of the overall median in a word's usual effect."""

TO_NORMAL = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""

CACHED_CAPTIONS = 8192
"""Captions whose words and classes are cached: an audit asks for those of a caption many times."""

FOLDS = 5
MIN_LANGUAGE_CAPTIONS = 500
"""Captions below which a language model of them says too little."""


@dataclass(frozen=True)
class MeasuredCaption:
    """A caption and, for each word without punctuation, its effect and surprise.

    ``surprise`` is None without a language model. Words that the matcher does not ``know`` have no
    effect, so they are never in doubt; None: it knows them all.
    """

    text: str
    effects: Values
    surprise: Values | None = None
    known: NDArray[np.bool_] | None = None

    @property
    def words(self) -> list[str]:
        return spoken_words(self.text)


def spoken_words(text: str) -> list[str]:
    """The words of a caption in lower case, without punctuation."""
    return list(_read(text)[0])


def is_spoken(text: str) -> NDArray[np.bool_]:
    """Whether each word of a caption is none of the punctuation marks; read-only."""
    return _read(text)[1]


@lru_cache(maxsize=CACHED_CAPTIONS)
def _read(text: str) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
    own = caption_words(text)
    spoken = np.array([not word.is_punctuation for word in own], dtype=np.bool_)
    spoken.setflags(write=False)
    return tuple(word.text.lower() for word in own if not word.is_punctuation), spoken


@lru_cache(maxsize=CACHED_CAPTIONS)
def may_be_wrong(text: str) -> NDArray[np.bool_]:
    """Whether each word without punctuation can make a caption false, by its class; read-only."""
    classes = np.array([kind not in NEVER_WRONG for kind in tag(words(text))], dtype=np.bool_)
    possible = classes[is_spoken(text)]
    possible.setflags(write=False)
    return possible


def surprises(language: CaptionModel, texts: Iterable[str]) -> list[Values]:
    """Surprise of each word without punctuation, in nats."""
    return [language.surprise(text)[is_spoken(text)] for text in texts]


class WordDoubts:
    """Doubts about words, relative to what is usual in ``reference`` captions.

    >>> usual = [MeasuredCaption("a dog", np.array([0.0, 0.4 + k / 100])) for k in range(9)]
    >>> doubts = WordDoubts(usual)
    >>> bool(doubts.of(MeasuredCaption("a dog", np.array([0.0, -0.1])))[1] > 5)
    True
    """

    def __init__(
        self, reference: Iterable[MeasuredCaption], weight: float = SURPRISE_WEIGHT
    ) -> None:
        captions = list(reference)
        effects: dict[str, list[float]] = defaultdict(list)
        for caption in captions:
            for word, effect, known in zip(
                caption.words, caption.effects.tolist(), _known(caption), strict=True
            ):
                if known:
                    effects[word].append(effect)
        every = [effect for each in effects.values() for effect in each]
        self.overall = float(np.median(every)) if every else 0.0
        self.usual = {
            word: (sum(each) + SHRINKAGE_COUNT * self.overall) / (len(each) + SHRINKAGE_COUNT)
            for word, each in effects.items()
        }
        self.weight = weight
        short = [self.shortfall(c)[may_be_wrong(c.text) & _known(c)] for c in captions]
        self.spread = robust_spread(np.concatenate([*short, np.empty(0)]))

    def usual_effect(self, word: str) -> float:
        return self.usual.get(word.lower(), self.overall)

    def shortfall(self, caption: MeasuredCaption) -> Values:
        """Usual effect of each word minus its effect here; 0 for an unknown word."""
        usual = np.array([self.usual_effect(word) for word in caption.words])
        return np.where(_known(caption), usual - caption.effects, 0.0)

    def worst(self, caption: MeasuredCaption) -> float:
        """The largest shortfall of a caption's known words; 0 without any."""
        short = self.shortfall(caption)[_known(caption)]
        return float(short.max()) if len(short) else 0.0

    def of(self, caption: MeasuredCaption) -> Values:
        """Doubt of each word without punctuation, in robust deviations."""
        doubts = self.shortfall(caption) / self.spread
        if caption.surprise is not None:
            doubts = doubts + self.weight * caption.surprise
        return np.where(may_be_wrong(caption.text) & _known(caption), doubts, NO_DOUBT)


def _known(caption: MeasuredCaption) -> NDArray[np.bool_]:
    return np.ones(len(caption.effects), dtype=np.bool_) if caption.known is None else caption.known


def robust_spread(values: Values) -> float:
    """The robust standard deviation; the plain one if most values are equal; 1 if all are."""
    if not len(values):
        return 1.0
    spread = TO_NORMAL * float(np.median(np.abs(values - np.median(values))))
    return spread or float(np.std(values)) or 1.0


def cross_surprises(
    texts: Sequence[str],
    images: Sequence[int],
    wanted: Sequence[int],
    progress: Progress | None = None,
) -> dict[int, Values]:
    """Surprise of the words of ``wanted`` captions, each by a model of other images' captions.

    Images are dealt into `FOLDS` parts, so that no caption is part of the model that judges it.
    Empty if there are too few captions for a language model.
    """
    progress = progress or Silent()
    fold = np.asarray(images) % FOLDS
    result: dict[int, Values] = {}
    for number in range(FOLDS):
        others = [text for text, part in zip(texts, fold.tolist(), strict=True) if part != number]
        if len(others) < MIN_LANGUAGE_CAPTIONS:
            return {}
        mine = [index for index in wanted if fold[index] == number]
        if mine:
            language = CaptionModel(others)
            own = [texts[index] for index in mine]
            title = f"surprise of words, part {number + 1} of {FOLDS}"
            each = surprises(language, progress.track(own, title, len(own)))
            result.update(zip(mine, each, strict=True))
    return result
