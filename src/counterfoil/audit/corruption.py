"""Captions made wrong at a known rate, so that finding them can be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.noise import shuffled_captions
from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError
from counterfoil.evaluation.word_foils import FoilCase, make_foils


@dataclass(frozen=True)
class Corrupted:
    """A split with some captions made wrong, and the truth about it.

    ``swapped[k]``: caption ``k`` came from another image. ``wrong[k]``: for a caption with words
    exchanged, what kind of error each of its words is (empty: none), punctuation left out.
    """

    split: Split
    swapped: NDArray[np.bool_]
    wrong: dict[int, tuple[str, ...]]

    @property
    def labels(self) -> NDArray[np.bool_]:
        """Which captions are wrong, in one way or the other."""
        found = self.swapped.copy()
        found[list(self.wrong)] = True
        return found


def corrupt(split: Split, swapped: float, words: float, seed: int = 0) -> Corrupted:
    """Give a share ``swapped`` of the captions to other images, and falsify words of others.

    The second share is of all captions too, so that both together must stay below 1; it needs
    scenes whose truth is known, and is smaller where too few captions can be made false.
    """
    if swapped < 0 or words < 0 or swapped + words > 1:
        raise ConfigError(f"corruption: expected shares of at most 1 in all, got {swapped}+{words}")
    moved, index = shuffled_captions(split, swapped, seed)
    gone = split.image_of[index] != split.image_of
    texts = list(moved.texts)
    wrong: dict[int, tuple[str, ...]] = {}
    if words > 0:
        cases = _by_caption(split, make_foils(split, seed=seed).cases)
        able = np.array([k for k in sorted(cases) if index[k] == k], dtype=np.int64)
        drawn = min(round(words * len(texts)), len(able))
        for caption in np.random.default_rng(seed).choice(able, size=drawn, replace=False):
            case = cases[int(caption)]
            texts[int(caption)], wrong[int(caption)] = case.foil, case.wrong
    return Corrupted(_with_texts(moved, texts), gone, wrong)


def _by_caption(split: Split, cases: Sequence[FoilCase]) -> dict[int, FoilCase]:
    """The false form of each caption that has one, by the caption's number."""
    found = {(case.image, case.caption): case for case in cases}
    keys = zip(split.image_of.tolist(), split.texts, strict=True)
    return {number: found[key] for number, key in enumerate(keys) if key in found}


def _with_texts(split: Split, texts: Sequence[str]) -> Split:
    ends = list(accumulate(len(captions) for captions in split.captions))
    starts = [0, *ends[:-1]]
    captions = [list(texts[start:end]) for start, end in zip(starts, ends, strict=True)]
    return replace(split, captions=captions, extras=None)
