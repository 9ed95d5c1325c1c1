"""Captions packed for kernels: into tiles of words, or side by side.

A tile has ``words`` places for words and ``slots`` places for captions, and holds whole captions.
Which caption a word belongs to is its segment: the number of its caption's slot in the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Where the words of captions, given one after the other, stand in tiles.

    ``rows`` [tiles · words] is the word at each place, or their number where none stands (a row of
    zeros put behind them); ``segments`` its slot, ``slots`` where none stands. ``counts``
    [tiles · slots] are the words of a slot's caption, ``owners`` which caption that is (any, where
    there is none), ``places`` [captions] the slot of each.
    """

    rows: Tensor
    segments: Tensor
    counts: Tensor
    owners: Tensor
    places: Tensor
    words: int
    slots: int

    @property
    def tiles(self) -> int:
        return len(self.rows) // self.words

    def to(self, device: torch.device) -> Packing:
        rows, segments, counts, owners, places = moved(
            device, self.rows, self.segments, self.counts, self.owners, self.places
        )
        return Packing(rows, segments, counts, owners, places, self.words, self.slots)


@lru_cache(8)
def pack_batch(lengths: tuple[int, ...], words: int, slots: int) -> Packing:
    """`pack`, done once for a batch that several models score, one after the other."""
    return pack(lengths, words, slots)


def pack(lengths: Sequence[int], words: int = 128, slots: int = 16) -> Packing:
    """Tiles for captions of these lengths; captions of like length share one, which fills it best.

    A caption without words takes no slot; its place is that of an empty slot behind the last tile.

    >>> found = pack([2, 0, 3], words=4, slots=2)
    >>> found.rows.tolist(), found.segments.tolist()
    ([0, 1, 5, 5, 2, 3, 4, 5], [0, 0, 2, 2, 0, 0, 0, 2])
    >>> found.places.tolist(), found.counts.tolist(), found.owners.tolist()
    ([0, 4, 2], [2, 0, 3, 0], [0, 0, 2, 0])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > words:
        raise ValueError(f"a caption of {int(sizes.max())} words does not fit a tile of {words}")
    tile_of, slot_of, offset_of = _fill(sizes, words, slots)
    real = sizes > 0
    tiles = int(tile_of[real].max()) + 1 if real.any() else 0
    rows = np.full(tiles * words, int(sizes.sum()), dtype=np.int64)
    segments = np.full(tiles * words, slots, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(int(sizes.sum())) - starts[owner]
    at = tile_of[owner] * words + offset_of[owner] + within
    rows[at] = np.arange(int(sizes.sum()))
    segments[at] = slot_of[owner]
    places = np.where(real, tile_of * slots + slot_of, tiles * slots)
    counts = np.zeros(tiles * slots, dtype=np.int64)
    counts[places[real]] = sizes[real]
    owners = np.zeros(tiles * slots, dtype=np.int64)
    owners[places[real]] = np.flatnonzero(real)
    found = [torch.from_numpy(x) for x in (rows, segments, counts, owners, places)]
    return Packing(found[0], found[1], found[2], found[3], found[4], words, slots)


def _fill(sizes: Indices, words: int, slots: int) -> tuple[Indices, Indices, Indices]:
    """Tile, slot and first place of each caption."""
    order = np.argsort(sizes, kind="stable")
    order = order[sizes[order] > 0]
    at: list[tuple[int, int, int]] = []
    tile = slot = used = 0
    for size in sizes[order].tolist():
        if used + size > words or slot == slots:
            tile, slot, used = tile + 1, 0, 0
        at.append((tile, slot, used))
        slot, used = slot + 1, used + size
    found = np.zeros((3, len(sizes)), dtype=np.int64)
    found[:, order] = np.array(at, dtype=np.int64).reshape(-1, 3).T
    return found[0], found[1], found[2]


@dataclass(frozen=True)
class InterleavedCaptions:
    """Captions side by side in groups of ``width``, their words interleaved.

    Word j of the captions of a group stands at ``bases[group] + j · width + lane``; a group is as
    long as its longest caption (``sizes``). ``rows`` and ``places`` are as in `Packing`;
    ``lengths`` [groups · width] the words of each caption.
    """

    rows: Tensor
    bases: Tensor
    sizes: Tensor
    lengths: Tensor
    places: Tensor
    width: int
    spans: tuple[tuple[int, int], ...]

    @property
    def groups(self) -> int:
        return len(self.spans)

    def to(self, device: torch.device) -> InterleavedCaptions:
        rows, bases, sizes, lengths, places = moved(
            device, self.rows, self.bases, self.sizes, self.lengths, self.places
        )
        return InterleavedCaptions(rows, bases, sizes, lengths, places, self.width, self.spans)


def interleave(lengths: Sequence[int], width: int = 128, step: int = 1) -> InterleavedCaptions:
    """Groups of captions of like length; a group's size is rounded up to a multiple of ``step``.

    ``spans`` are where each group's words start, and its size.

    >>> groups = interleave([2, 1, 3], width=2)
    >>> groups.rows.tolist(), groups.places.tolist(), groups.spans
    ([2, 0, 6, 1, 3, 6, 4, 6, 5, 6], [1, 0, 2], ((0, 2), (4, 3)))
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(sizes, kind="stable")
    groups = -(-len(sizes) // width)
    padded = np.zeros(groups * width, dtype=np.int64)
    padded[: len(sizes)] = sizes[order]
    longest = padded.reshape(groups, width).max(1, initial=0)
    longest = -(-longest // step) * step
    bases = np.cumsum(longest * width) - longest * width
    places = np.empty(len(sizes), dtype=np.int64)
    places[order] = np.arange(len(sizes))
    total = int(sizes.sum())
    rows = np.full(int((longest * width).sum()), total, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(total) - starts[owner]
    rows[bases[places[owner] // width] + within * width + places[owner] % width] = np.arange(total)
    found = [torch.from_numpy(x) for x in (rows, bases, longest, padded, places)]
    spans = tuple(zip(bases.tolist(), longest.tolist(), strict=True))
    return InterleavedCaptions(found[0], found[1], found[2], found[3], found[4], width, spans)


def moved(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Indices on a device, by one copy; each starts at a multiple of 16 bytes, as kernels like."""
    starts = np.cumsum([0, *(len(tensor) + len(tensor) % 2 for tensor in tensors)]).tolist()
    whole = torch.zeros(starts[-1], dtype=torch.long, pin_memory=device.type == "cuda")
    held = whole.numpy()
    spans = [slice(at, at + len(tensor)) for at, tensor in zip(starts, tensors, strict=False)]
    for span, tensor in zip(spans, tensors, strict=True):
        held[span] = tensor.numpy()
    there = whole.to(device, non_blocking=True)
    return tuple(there[span] for span in spans)
