"""Images that look alike although their files differ: scaled, or encoded again.

An image is known by its difference hash (64 signs: is a cell brighter than its neighbor?) and by
a thumbnail. Hashes find candidates fast, thumbnails decide: a hash knows no colors and says little
of a picture with large flat areas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from PIL import Image

BITS = 3
"""Signs of 64 in which the hashes of look-alikes may differ."""

MEAN_LEVELS, MOST_LEVELS = 6.0, 32
"""Levels of 255 by which their thumbnails may differ: on average, and anywhere."""

MOST_COMPARISONS = 100_000_000
"""Pairs of hashes that are compared at most, so that the time is bounded whatever the images."""

_SIDE = 8
_BANDS = BITS + 1  # hashes that differ in n signs are equal in at least one of n + 1 parts
_THUMBNAILS = 1000  # compared for one image at most: so many share a hash only if they are flat
_THUMBNAIL_COST = 32  # comparisons of hashes that take as long as one of thumbnails


@dataclass(frozen=True)
class Look:
    """One image: its hash, and its thumbnail [8, 8, 3]."""

    hash: int
    thumbnail: NDArray[np.uint8]


@dataclass(frozen=True)
class Looks:
    """The images of a split that could be decoded: ``indices`` into it, hashes, thumbnails."""

    indices: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    thumbnails: NDArray[np.int16]

    @cached_property
    def brightness(self) -> NDArray[np.float32]:
        """Mean of each thumbnail, which tells most images apart that have few edges."""
        means: NDArray[np.float32] = self.thumbnails.mean(1, dtype=np.float32)
        return means

    @classmethod
    def of(cls, looks: Sequence[Look | None]) -> Looks:
        known = [(index, look) for index, look in enumerate(looks) if look is not None]
        thumbnails = np.zeros((len(known), _SIDE * _SIDE * 3), dtype=np.int16)
        for row, (_, look) in enumerate(known):
            thumbnails[row] = look.thumbnail.reshape(-1)
        return cls(
            np.array([index for index, _ in known], dtype=np.int64),
            np.array([look.hash for _, look in known], dtype=np.uint64),
            thumbnails,
        )


@dataclass(frozen=True)
class LookAlikes:
    """Pairs of images, one of each split; ``complete`` is False if the search was cut short."""

    pairs: list[tuple[int, int]]
    complete: bool


def look_at(image: Image.Image) -> Look:
    """Hash and thumbnail of an RGB image."""
    grey = image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX)
    cells = np.asarray(grey, dtype=np.int16)
    signs = (cells[:, 1:] > cells[:, :-1]).reshape(-1)
    number = int.from_bytes(np.packbits(signs).tobytes(), "big")
    small = image.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return Look(number, np.asarray(small, dtype=np.uint8))


def find_look_alikes(one: Looks, other: Looks) -> LookAlikes:
    """For each image of ``other`` one that looks like it, if any, among those of ``one``.

    Only hashes that share one of four parts are compared.
    """
    found: dict[int, int] = {}
    left, complete = MOST_COMPARISONS, True
    for band in range(_BANDS):
        mine, theirs = _buckets(one.hashes, band), _buckets(other.hashes, band)
        for part in mine.keys() & theirs.keys() if left > 0 else ():
            new = [row for row in theirs[part] if row not in found]
            compared, all_compared = _match(one, other, np.array(mine[part]), new, found, left)
            left -= compared
            complete &= all_compared
    pairs = [(int(one.indices[a]), int(other.indices[b])) for b, a in sorted(found.items())]
    return LookAlikes(pairs, complete=complete and left > 0)


def _buckets(hashes: NDArray[np.uint64], band: int) -> dict[int, list[int]]:
    """Rows by one of the four parts of their hash."""
    width = np.uint64(64 // _BANDS)
    parts = (hashes >> (np.uint64(band) * width)) & np.uint64((1 << int(width)) - 1)
    rows: dict[int, list[int]] = defaultdict(list)
    for row, part in enumerate(parts.tolist()):
        rows[part].append(row)
    return rows


def _match(
    one: Looks,
    other: Looks,
    mine: NDArray[np.int64],
    theirs: Sequence[int],
    found: dict[int, int],
    limit: int,
) -> tuple[int, bool]:
    """Add the look-alikes among some images to ``found``.

    Returns the number of comparisons it took, and whether each candidate was compared for every
    image without a look-alike.
    """
    compared, complete = 0, True
    for row in theirs:
        if compared > limit:
            complete = False
            break
        compared += len(mine)
        near = mine[_count_bits(one.hashes[mine] ^ other.hashes[row]) <= BITS]
        near = near[np.abs(one.brightness[near] - other.brightness[row]) <= MEAN_LEVELS]
        candidates = len(near)
        near = near[:_THUMBNAILS]
        compared += len(near) * _THUMBNAIL_COST
        levels = np.abs(one.thumbnails[near] - other.thumbnails[row])
        alike = near[(levels.mean(1) <= MEAN_LEVELS) & (levels.max(1, initial=0) <= MOST_LEVELS)]
        if len(alike):
            found[row] = int(alike[0])
        elif candidates > len(near):
            complete = False
    return compared, complete


def _count_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Set bits of each number, by adding neighboring counts up (numpy before 2 has no function)."""
    masks = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
    one, two, four = (np.uint64(mask) for mask in masks)
    values = values - ((values >> np.uint64(1)) & one)
    values = (values & two) + ((values >> np.uint64(2)) & two)
    values = (values + (values >> np.uint64(4))) & four
    return (values * np.uint64(0x0101010101010101)) >> np.uint64(56)
