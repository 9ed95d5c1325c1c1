"""How a large grid of image-text pairs is cut into tiles that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

CPU_CELLS = 1 << 22
"""Cells (word-region similarities) of a tile on a CPU: small enough to stay near the caches."""

GPU_SHARE = 0.25
"""Part of the free GPU memory that one tile's temporaries may take."""


@dataclass(frozen=True)
class TilePlan:
    """Rows (images) and columns (texts) of a tile."""

    rows: int
    columns: int

    def spans(self, n_rows: int, n_columns: int) -> Iterator[tuple[slice, slice]]:
        for left in range(0, n_columns, self.columns):
            for top in range(0, n_rows, self.rows):
                yield slice(top, top + self.rows), slice(left, left + self.columns)


def free_on_gpu(device: torch.device) -> int:
    """Bytes that tensors may still take: those that nobody has, and those this process keeps.

    PyTorch keeps what tensors have left for the next ones, which others see as taken.
    """
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + max(0, kept)


def plan_tiles(
    n_rows: int, n_columns: int, cells_per_pair: int, floats_per_cell: int, device: torch.device
) -> TilePlan:
    """The largest tile whose temporaries fit.

    ``cells_per_pair`` is words × regions, ``floats_per_cell`` how many numbers a matcher holds for
    each of them at once.
    """
    if device.type == "cuda":
        cells = int(free_on_gpu(device) * GPU_SHARE) // (4 * max(1, floats_per_cell))
    else:
        cells = CPU_CELLS * 8 // max(8, floats_per_cell)
    pairs = max(1, cells // max(1, cells_per_pair))
    rows = max(1, min(n_rows, pairs))
    return TilePlan(rows, max(1, min(n_columns, pairs // rows)))
