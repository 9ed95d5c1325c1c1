"""Outputs of networks as cells with boxes: maps [B, C, H, W] and rows of tokens [B, T, D]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from counterfoil.features.backbone import Array
from counterfoil.features.views import grid_boxes

Cells = tuple[Array, Array, Array]
"""Features [B, n, D], boxes [B, n, 4], one vector for each whole view [B, D]."""


def map_cells(maps: Array) -> Cells:
    """The cells of maps [B, C, H, W], row by row; their mean stands for the whole."""
    batch, _, rows, columns = maps.shape
    cells = np.ascontiguousarray(maps.reshape(batch, -1, rows * columns).transpose(0, 2, 1))
    return cells, _boxes(batch, rows, columns), cells.mean(axis=1)


def token_cells(tokens: Array, shape: tuple[int, ...], patch: Any = None) -> Cells:
    """The patches among tokens [B, T, D] of pictures of a shape (height, width).

    Tokens before the patches (a class token, registers) are not places; the first of them stands
    for the whole where there are any, else the patches' mean.
    """
    batch, count = tokens.shape[:2]
    rows, columns = _grid(count, shape, patch)
    special = count - rows * columns
    cells = np.ascontiguousarray(tokens[:, special:])
    pooled = tokens[:, 0] if special else cells.mean(axis=1)
    return cells, _boxes(batch, rows, columns), pooled


def _grid(count: int, shape: tuple[int, ...], patch: Any) -> tuple[int, int]:
    """Rows and columns of patches: by the patch's size where that fits, else the largest square."""
    if isinstance(patch, int) and patch > 0:
        rows, columns = shape[0] // patch, shape[1] // patch
        # Networks that merge patches have fewer tokens than their first grid, by powers of four.
        while rows * columns > count and min(rows, columns) > 1:
            rows, columns = rows // 2, columns // 2
        if rows * columns <= count:
            return rows, columns
    side = math.isqrt(count)
    return side, side


def _boxes(batch: int, rows: int, columns: int) -> Array:
    return np.broadcast_to(grid_boxes(rows, columns), (batch, rows * columns, 4))
