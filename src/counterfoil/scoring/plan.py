"""Plan the tiles for scoring all pairs: captions sorted by length, sizes limited by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.tensors.device import free_memory
from counterfoil.encoders import Encoded
from counterfoil.kernels.spec import WORDS

CPU_CELLS, GPU_CELLS = 1 << 26, 1 << 32
"""Most word-region similarities per tile: large enough to be fast, small enough to interrupt."""

KERNEL_CELLS = 1 << 37
"""The same for kernels that store only scores: one or two seconds on the fastest GPUs."""

MAX_TILE_PAIRS = 1 << 27
"""Most pairs per tile, as their scores are copied to host memory."""

FREE_SHARE = 0.25
"""Share of the free memory that a tile may use."""

BYTES_PER_CELL = 16

LEAST_TEXTS, MOST_PADDING = 128, 1 / 16
"""A tile of more than `LEAST_TEXTS` texts ends before its padding exceeds `MOST_PADDING`.

Smaller tiles are not worth a matcher's fixed work per tile.
"""


@dataclass(frozen=True)
class ScoreTile:
    """Images ``rows`` with the texts ``texts`` of the plan's order."""

    rows: slice
    texts: slice


@dataclass(frozen=True)
class ScorePlan:
    """Tiles of up to ``cells`` similarities over ``images`` and over texts in ``order``.

    ``lengths`` are the lengths of the texts in that order, ``rows`` the images per tile. With
    ``mixed``, up to that number of texts of any length share a tile; only texts too long for the
    kernels have tiles of their own, which PyTorch scores. The same plan gives bit-identical scores.
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
        return [
            ScoreTile(slice(top, min(top + self.rows, self.images)), texts)
            for texts in self._groups()
            for top in range(0, self.images, self.rows)
        ]

    def columns(self, tile: ScoreTile) -> Tensor:
        """The indices of a tile's texts."""
        return self.order[tile.texts]

    def columns_on_cpu(self, tile: ScoreTile) -> Tensor:
        """The same in host memory, without a device sync."""
        return self._order_on_cpu[tile.texts]

    @cached_property
    def _order_on_cpu(self) -> Tensor:
        return self.order.cpu()

    def _groups(self) -> list[slice]:
        """Runs of texts of similar length, shortest first, that fit into a tile with its images."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        groups: list[slice] = []
        start = 0
        while start < len(lengths):
            stop = start + self._fitting(lengths[start:])
            groups.append(slice(start, stop))
            start = stop
        return groups

    def _fitting(self, lengths: NDArray[np.int64]) -> int:
        """How many of these texts, from the first on, fit into a tile; at least one."""
        capacity = self.cells // (self.rows * self.regions)
        window = 2 * LEAST_TEXTS
        while True:
            part = lengths[:window]
            count = np.arange(1, len(part) + 1)
            grid = part * count
            if self.mixed:
                uneven = (count > self.mixed) | ((part > WORDS) & (lengths[0] <= WORDS))
            else:
                uneven = (count > LEAST_TEXTS) & (grid - part.cumsum() > MOST_PADDING * grid)
            beyond = uneven | (grid > capacity)
            beyond[0] = False
            if beyond.any():
                return int(beyond.argmax())
            if len(part) == len(lengths):
                return len(part)
            window *= 4


def plan_scores(
    images: Encoded, texts: Encoded, cells: int | None = None, pairs: int | None = None
) -> ScorePlan:
    """A plan for images and texts; ``cells`` is by default limited by the free memory.

    ``pairs`` limits the pairs of a tile, for callers that store more than a score per pair.
    """
    device = images.mask.device
    lengths = texts.extents().clamp(min=1)
    order = lengths.argsort(stable=True)
    regions = max(1, int(images.extents().max())) if len(images) else 1
    longest = int(lengths.max()) if len(texts) else 1
    cells = cells or _cells_for_memory(device)
    pairs = MAX_TILE_PAIRS if pairs is None else pairs
    cells = min(cells, pairs * regions)  # a pair has at least one cell per region
    rows = max(1, min(len(images), cells // (regions * longest)))
    return ScorePlan(len(images), regions, order, lengths[order].tolist(), rows, cells)


def plan_for_kernels(images: Encoded, texts: Encoded, width: int) -> ScorePlan:
    """A plan for kernels, which store no similarities and skip padding: few, large tiles.

    A tile needs memory for its scores and its texts' fragments, of ``width`` numbers each.
    """
    capacity = int(free_memory(images.mask.device) * FREE_SHARE) // BYTES_PER_CELL
    plan = plan_scores(images, texts, KERNEL_CELLS, KERNEL_CELLS)
    rows = max(1, min(plan.rows, MAX_TILE_PAIRS, capacity))
    words = max(1, min(KERNEL_CELLS // (rows * plan.regions), capacity // max(1, width)))
    texts_at_once = max(1, min(MAX_TILE_PAIRS, capacity) // rows)
    return replace(plan, rows=rows, cells=words * rows * plan.regions, mixed=texts_at_once)


def _cells_for_memory(device: torch.device) -> int:
    most = GPU_CELLS if device.type == "cuda" else CPU_CELLS
    return max(1, min(most, int(free_memory(device) * FREE_SHARE) // BYTES_PER_CELL))
