"""How all pairs of two encoded sides are cut into tiles: captions by length, sizes by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from counterfoil.core.tensors.device import free_memory
from counterfoil.encoders import Encoded
from counterfoil.kernels.spec import WORDS

CPU_CELLS, GPU_CELLS = 1 << 26, 1 << 32
"""Most word-region similarities of a tile: enough to be fast, few enough to be stopped between."""

KERNEL_CELLS = 1 << 37
"""The same for kernels that hold only their scores: a second or two of the fastest GPUs."""

MAX_TILE_PAIRS = 1 << 27
"""Most pairs of a tile, whose scores wait in the host's memory: of whole vectors 2³² cells are 2³²
pairs."""

FREE_SHARE = 0.25
"""Part of the free memory that a tile may take."""

BYTES_PER_CELL = 16

LEAST_TEXTS, MOST_PADDING = 128, 1 / 16
"""Texts after which a tile ends where padding would be more than this share of it.

Fewer would not be worth what a matcher does once a tile for its images.
"""


@dataclass(frozen=True)
class ScoreTile:
    """Images ``rows`` with the texts at ``places`` of the plan's order."""

    rows: slice
    places: slice


@dataclass(frozen=True)
class ScorePlan:
    """Tiles of up to ``cells`` similarities over ``images`` and over texts in ``order``.

    ``lengths`` are those of the texts in that order, ``rows`` the images of a tile. With ``mixed``
    set, up to so many texts of any lengths share a tile, but for those too long for kernels, which
    PyTorch scores and everything that shares their tiles. The same plan makes the same tiles, and
    so the same scores to the last bit.
    """

    images: int
    regions: int
    order: Tensor
    lengths: Sequence[int]
    rows: int
    cells: int
    mixed: int = 0

    @cached_property
    def tiles(self) -> list[ScoreTile]:
        found: list[ScoreTile] = []
        for places in self._groups():
            for top in range(0, self.images, self.rows):
                rows = slice(top, min(top + self.rows, self.images))
                found.append(ScoreTile(rows, places))
        return found

    def columns(self, tile: ScoreTile) -> Tensor:
        """The texts of a tile, as indices."""
        return self.order[tile.places]

    def columns_on_cpu(self, tile: ScoreTile) -> Tensor:
        """The same in the host's memory, without waiting for what a GPU is doing."""
        return self._order_on_cpu[tile.places]

    @cached_property
    def _order_on_cpu(self) -> Tensor:
        return self.order.cpu()

    def _groups(self) -> list[slice]:
        """Runs of texts, shortest first, that fit beside a tile's images and are of like length."""
        room = self.cells // (self.rows * self.regions)
        groups: list[slice] = []
        start, words = 0, 0
        for place, length in enumerate(self.lengths):
            count = place + 1 - start
            padding = length * count - words - length
            uneven = count > LEAST_TEXTS and padding > MOST_PADDING * length * count
            if self.mixed:
                uneven = count > self.mixed or length > WORDS >= self.lengths[start]
            if place > start and (length * count > room or uneven):
                groups.append(slice(start, place))
                start, words = place, 0
            words += length
        if self.lengths:
            groups.append(slice(start, len(self.lengths)))
        return groups


def plan_scores(
    images: Encoded, texts: Encoded, cells: int | None = None, pairs: int | None = None
) -> ScorePlan:
    """A plan for two sides; ``cells`` is by default what the memory at hand allows.

    ``pairs`` is the most that a tile may hold, for those who hold more of a pair than its score.
    """
    device = images.mask.device
    lengths = extents(texts).clamp(min=1)
    order = lengths.argsort(stable=True)
    regions = max(1, int(extents(images).max())) if len(images) else 1
    longest = int(lengths.max()) if len(texts) else 1
    cells = cells or _cells_at_hand(device)
    pairs = MAX_TILE_PAIRS if pairs is None else pairs
    cells = min(cells, pairs * regions)  # a pair has at least as many cells as there are regions
    rows = max(1, min(len(images), cells // (regions * longest)))
    return ScorePlan(len(images), regions, order, lengths[order].tolist(), rows, cells)


def plan_for_kernels(images: Encoded, texts: Encoded, width: int) -> ScorePlan:
    """A plan for kernels that hold no similarities and know no padding: few, large tiles.

    What a tile takes are its texts' fragments, of ``width`` numbers each, and its scores.
    """
    room = int(free_memory(images.mask.device) * FREE_SHARE) // BYTES_PER_CELL
    plan = plan_scores(images, texts, KERNEL_CELLS, KERNEL_CELLS)
    rows = max(1, min(plan.rows, MAX_TILE_PAIRS, room))
    words = max(1, min(KERNEL_CELLS // (rows * plan.regions), room // max(1, width)))
    texts_at_once = max(1, min(MAX_TILE_PAIRS, room) // rows)
    return replace(plan, rows=rows, cells=words * rows * plan.regions, mixed=texts_at_once)


def extents(encoded: Encoded) -> Tensor:
    """Where the padding of each item begins [B], wherever its real fragments stand."""
    places = torch.arange(1, encoded.mask.shape[1] + 1, device=encoded.mask.device)
    if not len(places):  # whole vectors have no fragments
        return encoded.mask.new_zeros(len(encoded), dtype=torch.long)
    return (encoded.mask * places).amax(1)


def _cells_at_hand(device: torch.device) -> int:
    most = GPU_CELLS if device.type == "cuda" else CPU_CELLS
    return max(1, min(most, int(free_memory(device) * FREE_SHARE) // BYTES_PER_CELL))
