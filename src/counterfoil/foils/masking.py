"""Masked versions of a caption: by unit of its scene graph (TAGS), or token by token (UNITER)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.texts import HuggingFaceText, TextProcessor, WordText
from counterfoil.data.vocabulary import MASK, SPECIALS
from counterfoil.errors import ConfigError
from counterfoil.foils.graph import SceneGraph

RATE = 0.15
UNMASKED = -1
_MASKED, _EXCHANGED = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are

Places = tuple[int, ...]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class MaskTokens:
    """What masking may write: the mask, or one of the ``ordinary`` tokens."""

    mask: int
    ordinary: Ids

    @classmethod
    def of(cls, text: TextProcessor) -> MaskTokens:
        """Those of a text processor: every token but the special and the unused ones."""
        if isinstance(text, WordText):
            index = text.vocabulary.index
            special = {index[word] for word in SPECIALS}
            return cls(index[MASK], _all_but(special, len(text)))
        if not isinstance(text, HuggingFaceText) or text.tokenizer.mask_token_id is None:
            raise ConfigError("masking needs a tokenizer that has a mask token")
        tokenizer = text.tokenizer
        special = set(tokenizer.all_special_ids)
        special |= {i for token, i in tokenizer.get_vocab().items() if token.startswith("[unused")}
        return cls(int(tokenizer.mask_token_id), _all_but(special, len(text)))


def _all_but(special: set[int], size: int) -> Ids:
    return np.array([i for i in range(size) if i not in special], dtype=np.int64)


@dataclass(frozen=True)
class Masked:
    """Versions of a caption; ``labels`` has the true token where one was chosen, elsewhere −1."""

    ids: Ids  # [versions, tokens]
    labels: Ids  # [versions, tokens]


def graph_units(graph: SceneGraph, word_of: Sequence[int | None]) -> list[Places]:
    """Token places of each unit of a scene graph; of each single word's token where it has none.

    ``word_of`` is the word behind each token, None for special ones.

    >>> from counterfoil.foils.graph import Unit
    >>> graph_units(SceneGraph.of([Unit((1, 2), "object")]), [None, 0, 1, 1, 2, None])
    [(2, 3, 4)]
    """
    places: dict[int, list[int]] = {}
    for place, word in enumerate(word_of):
        if word is not None:
            places.setdefault(word, []).append(place)
    # Words that the tokenizer cut off have no tokens.
    units = [tuple(p for w in unit.positions for p in places.get(w, ())) for unit in graph.units()]
    return [unit for unit in units if unit] or token_units(word_of)


def token_units(word_of: Sequence[int | None]) -> list[Places]:
    """Each token by itself, special ones left out: plain masking."""
    return [(place,) for place, word in enumerate(word_of) if word is not None]


def unit_chances(units: Sequence[Places], rate: float = RATE) -> NDArray[np.float64]:
    """How likely each unit is chosen, so that a token of several units is not chosen more often.

    A place that is in f units has the chance ``rate``/f; a unit has the mean of its places'.
    """
    frequency = Counter(place for unit in units for place in unit)
    return np.array([np.mean([rate / frequency[place] for place in unit]) for unit in units])


def expected_share(units: Sequence[Places], words: int, rate: float = RATE) -> float:
    """The share of ``words`` tokens that `mask_versions` chooses on average, in closed form.

    A token is chosen with any unit it is in, or with the unit that is drawn if none was chosen.

    >>> round(expected_share([(0,), (1,)], 4), 3)  # (2 · 0.15 + 0.85²) / 4
    0.256
    """
    chances = unit_chances(units, rate).clip(0, 1)
    none = float(np.prod(1 - chances))
    spared: dict[int, float] = {}
    for unit, chance in zip(units, chances, strict=True):
        for place in unit:
            spared[place] = spared.get(place, 1.0) * (1 - chance)
    drawn = none * np.mean([len(unit) for unit in units])
    return float(sum(1 - chance for chance in spared.values()) + drawn) / words


def sentence_rate(units: Sequence[Places], words: int, share: float = RATE) -> float:
    """The rate with which ``share`` of all ``words`` of a sentence are chosen on average.

    Few units cover a sentence, so it is above the share. The least and the most that units allow
    are taken where the share cannot be reached: one unit at least, and no more than all of them.
    """
    low, high = 0.0, float(max(Counter(place for unit in units for place in unit).values()))
    if expected_share(units, words, low) >= share:
        return low
    if expected_share(units, words, high) <= share:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        if expected_share(units, words, middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mask_versions(
    ids: Sequence[int],
    units: Sequence[Places],
    versions: int,
    tokens: MaskTokens,
    rng: np.random.Generator,
    rate: float = RATE,
) -> Masked:
    """``versions`` maskings of a caption's ids, each with one unit chosen at least.

    Of the tokens of chosen units 80 % become the mask, 10 % any ordinary token, 10 % stay; all of
    them are to be predicted. A caption with nothing to mask has no version.
    """
    true = np.asarray(ids, dtype=np.int64)
    if not units:
        empty = np.zeros((0, len(true)), dtype=np.int64)
        return Masked(empty, empty.copy())
    chosen = rng.random((versions, len(units))) < unit_chances(units, rate)
    instead = rng.integers(len(units), size=versions)
    none = ~chosen.any(axis=1)
    chosen[none, instead[none]] = True
    belongs = np.zeros((len(units), len(true)), dtype=np.int64)
    for number, unit in enumerate(units):
        belongs[number, list(unit)] = 1
    labelled = chosen @ belongs > 0  # [versions, tokens]
    fate = rng.random(labelled.shape)
    others = tokens.ordinary[rng.integers(len(tokens.ordinary), size=labelled.shape)]
    changed = np.where(fate < _MASKED, tokens.mask, others)
    stays = ~labelled | (fate >= _MASKED + _EXCHANGED)
    return Masked(np.where(stays, true, changed), np.where(labelled, true, UNMASKED))
