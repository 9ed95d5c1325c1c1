"""Foils that a model is judged by: made by rule, or read from a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from counterfoil.data.pairs import Split
from counterfoil.data.words import words
from counterfoil.errors import ConfigError, DataError
from counterfoil.foils import DEFAULT_KINDS, rule_foils
from counterfoil.foils.matching import foils_by_caption


@dataclass(frozen=True)
class FoilPair:
    """A caption, by its index into the split's texts, and the same made false."""

    caption: int
    foil: str


@dataclass(frozen=True)
class FoilSet:
    """Foils of some captions of a split, in the order of these.

    ``captions`` were asked for; ``left_out`` of them have no foil.
    """

    name: str
    pairs: tuple[FoilPair, ...]
    captions: int
    left_out: int

    @classmethod
    def of(cls, name: str, pairs: Sequence[FoilPair], captions: int) -> FoilSet:
        if not pairs:
            raise DataError(f"{name}: there is no foil of any of {captions} captions")
        ordered = tuple(sorted(pairs, key=lambda pair: pair.caption))
        return cls(name, ordered, captions, captions - len({pair.caption for pair in pairs}))


def choose_captions(split: Split, most: int | None, seed: int) -> list[int]:
    """Indices of all captions, or of ``most`` of them drawn at random."""
    count = len(split.texts)
    if most is not None and most < 1:
        raise ConfigError(f"foils: expected at least 1 caption, got {most}")
    if most is None or most >= count:
        return list(range(count))
    return sorted(random.Random(f"{seed}/captions").sample(range(count), most))


def rule_set(
    split: Split,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    per_caption: int = 1,
    most: int | None = None,
    seed: int = 0,
) -> FoilSet:
    """VSE-C's foils; none brings in a word of the image's own captions."""
    chosen = choose_captions(split, most, seed)
    pairs: list[FoilPair] = []
    for index in chosen:
        own = split.captions[int(split.image_of[index])]
        avoid = frozenset(word for text in own for word in words(text))
        rng = random.Random(f"{seed}/{index}/{split.texts[index]}")
        found = rule_foils(split.texts[index], rng, kinds, per_caption, avoid)
        pairs += [FoilPair(index, foil.text) for foil in found]
    return FoilSet.of("rules", pairs, len(chosen))


def stored_set(path: Path, split: Split, *, most: int | None = None, seed: int = 0) -> FoilSet:
    """The foils of a file that belong to a split, by the image's id and the caption."""
    by_caption = foils_by_caption(path, split)
    chosen = choose_captions(split, most, seed)
    pairs = [FoilPair(index, foil) for index in chosen for foil in by_caption.get(index, ())]
    return FoilSet.of(path.name, pairs, len(chosen))
