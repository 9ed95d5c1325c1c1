"""Packing of captions for the kernels: into tiles of words, or interleaved.

A tile has ``words`` positions for words and ``slots`` for captions, and holds whole captions. The
segment of a word is the slot of its caption in the tile.
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
    """Positions of concatenated captions' words in tiles.

    ``rows`` [tiles · words] is the word at each position, or the number of words (a row of zeros
    appended to them) if it is unused. ``segments`` is the word's slot, ``slots`` if unused.
    ``counts`` [tiles · slots] are the words of each slot's caption, ``owners`` that caption
    (arbitrary in an empty slot), ``places`` [captions] the slot of each caption.
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
    """`pack`, cached for a batch that several models score."""
    return pack(lengths, words, slots)


def pack(lengths: Sequence[int], words: int = 128, slots: int = 16) -> Packing:
    """Tiles for captions of these lengths; captions of similar length share one.

    A caption without words takes no slot; its place is an empty slot after the last tile.

    >>> packing = pack([2, 0, 3], words=4, slots=2)
    >>> packing.rows.tolist(), packing.segments.tolist()
    ([0, 1, 5, 5, 2, 3, 4, 5], [0, 0, 2, 2, 0, 0, 0, 2])
    >>> packing.places.tolist(), packing.counts.tolist(), packing.owners.tolist()
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
    tensors = [torch.from_numpy(x) for x in (rows, segments, counts, owners, places)]
    return Packing(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], words, slots)


def _fill(sizes: Indices, words: int, slots: int) -> tuple[Indices, Indices, Indices]:
    """Tile, slot and first position of each caption."""
    order = np.argsort(sizes, kind="stable")
    order = order[sizes[order] > 0]
    at: list[tuple[int, int, int]] = []
    tile = slot = used = 0
    for size in sizes[order].tolist():
        if used + size > words or slot == slots:
            tile, slot, used = tile + 1, 0, 0
        at.append((tile, slot, used))
        slot, used = slot + 1, used + size
    filled = np.zeros((3, len(sizes)), dtype=np.int64)
    filled[:, order] = np.array(at, dtype=np.int64).reshape(-1, 3).T
    return filled[0], filled[1], filled[2]


@dataclass(frozen=True)
class InterleavedCaptions:
    """Captions in groups of ``width``, their words interleaved.

    Word j of a group's captions is at ``bases[group] + j · width + lane``; ``sizes`` are the words
    of each group's longest caption. ``rows`` and ``places`` are as in `Packing`; ``lengths``
    [groups · width] are the words of each caption, ``spans`` the start and size of each group, in
    which the size is padded.
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
    """Groups of captions of similar length, padded to a multiple of ``step``.

    >>> captions = interleave([2, 1, 3], width=2)
    >>> captions.rows.tolist(), captions.places.tolist(), captions.spans
    ([2, 0, 6, 1, 3, 6, 4, 6, 5, 6], [1, 0, 2], ((0, 2), (4, 3)))
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(sizes, kind="stable")
    groups = -(-len(sizes) // width)
    padded = np.zeros(groups * width, dtype=np.int64)
    padded[: len(sizes)] = sizes[order]
    longest = padded.reshape(groups, width).max(1, initial=0)
    steps = -(-longest // step) * step
    bases = np.cumsum(steps * width) - steps * width
    places = np.empty(len(sizes), dtype=np.int64)
    places[order] = np.arange(len(sizes))
    total = int(sizes.sum())
    rows = np.full(int((steps * width).sum()), total, dtype=np.int64)
    word = np.arange(total)
    # word w of a caption that starts at word s is at first + (w − s) · width
    first = bases[places // width] + places % width - (np.cumsum(sizes) - sizes) * width
    rows[np.repeat(first, sizes) + word * width] = word
    tensors = [torch.from_numpy(x) for x in (rows, bases, longest, padded, places)]
    spans = tuple(zip(bases.tolist(), steps.tolist(), strict=True))
    return InterleavedCaptions(
        tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], width, spans
    )


def moved(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Indices on a device, by one copy; each starts at a multiple of 16 bytes, for the kernels."""
    starts = np.cumsum([0, *(len(tensor) + len(tensor) % 2 for tensor in tensors)]).tolist()
    whole = torch.zeros(starts[-1], dtype=torch.long, pin_memory=device.type == "cuda")
    buffer = whole.numpy()
    spans = [slice(at, at + len(tensor)) for at, tensor in zip(starts, tensors, strict=False)]
    for span, tensor in zip(spans, tensors, strict=True):
        buffer[span] = tensor.numpy()
    there = whole.to(device, non_blocking=True)
    return tuple(there[span] for span in spans)
