"""Masked versions of a caption: by unit of its scene graph (TAGS), or token by token (UNITER)."""

from __future__ import annotations

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

BISECTIONS = 12
"""Halvings of the interval in which a rate is sought; interpolation then does the rest."""

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


@dataclass(frozen=True)
class UnitCoverage:
    """How often each of U units covers each of P places; ``chances`` of the units at a rate of 1.

    A place that is in f units has the chance 1/f, so that it is not chosen more often than others;
    a unit has the mean of its places'.
    """

    counts: Ids  # [U, P]
    chances: NDArray[np.float64]  # [U]

    @classmethod
    def of(cls, units: Sequence[Places]) -> UnitCoverage:
        columns = {place: n for n, place in enumerate({p for unit in units for p in unit})}
        counts = np.zeros((len(units), len(columns)), dtype=np.int64)
        for number, unit in enumerate(units):
            for place in unit:
                counts[number, columns[place]] += 1
        chances = (counts / counts.sum(0)).sum(1) / counts.sum(1)
        return cls(counts, chances)

    def expected_tokens(self, rate: float) -> float:
        """Tokens that `mask_versions` chooses on average, in closed form.

        A token is chosen with any unit it is in, or with the unit that is drawn if none was chosen.
        """
        missed = 1 - (rate * self.chances).clip(0, 1)
        chosen = self.counts.shape[1] - np.prod(missed[:, None] ** self.counts, axis=0).sum()
        return float(chosen + np.prod(missed) * self.counts.sum() / len(self.counts))


def unit_chances(units: Sequence[Places], rate: float = RATE) -> NDArray[np.float64]:
    """How likely each unit is chosen: see `UnitCoverage`."""
    return rate * UnitCoverage.of(units).chances


def expected_share(units: Sequence[Places], words: int, rate: float = RATE) -> float:
    """The share of ``words`` tokens that `mask_versions` chooses on average.

    >>> round(expected_share([(0,), (1,)], 4), 3)  # (2 · 0.15 + 0.85²) / 4
    0.256
    """
    return UnitCoverage.of(units).expected_tokens(rate) / words


def sentence_rate(units: Sequence[Places], words: int, share: float = RATE) -> float:
    """The rate with which ``share`` of all ``words`` of a sentence are chosen on average.

    Few units cover a sentence, so it is above the share. The least and the most that units allow
    are taken where the share cannot be reached: one unit at least, and no more than all of them.
    """
    coverage, wanted = UnitCoverage.of(units), share * words
    low, high = 0.0, float(coverage.counts.sum(0).max())
    least, most = coverage.expected_tokens(low), coverage.expected_tokens(high)
    if least >= wanted:
        return low
    if most <= wanted:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tokens = coverage.expected_tokens(middle)
        if tokens < wanted:
            low, least = middle, tokens
        else:
            high, most = middle, tokens
    return low + (high - low) * (wanted - least) / (most - least)  # nearly linear in between


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
