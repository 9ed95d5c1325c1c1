"""The best targets of each query, a chunk of queries at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from counterfoil.errors import DataError
from counterfoil.evaluation.matrices import (
    Indices,
    ScoreMatrix,
    check_matrix,
    read_rows,
    row_chunks,
)

# Larger than a rank's chunk: a transposed matrix is read in strips, and wide strips read better.
CHUNK_CELLS = 2_000_000


def transposed(scores: Any) -> ScoreMatrix:
    """The matrix the other way round, as a view: texts as queries, images as targets."""
    view: ScoreMatrix = scores.T
    return view


def top_k(scores: ScoreMatrix, k: int, *, chunk_rows: int | None = None) -> Indices:
    """Indices ``[n_queries, k]`` of the best targets of each row, best first.

    Among equal scores the target with the lower index comes first.

    >>> top_k(np.array([[0.1, 0.9, 0.5], [0.7, 0.7, 0.8]]), 2).tolist()
    [[1, 2], [2, 0]]
    """
    n_queries, n_targets = check_matrix(scores)
    if k < 1:
        raise DataError(f"k must be at least 1, got {k}")
    k = min(k, n_targets)
    found = np.empty((n_queries, k), dtype=np.int64)
    for first, last in row_chunks(0, n_queries, n_targets, CHUNK_CELLS, chunk_rows):
        rows = read_rows(scores, first, last)
        for row, values in enumerate(rows, start=first):
            # argpartition picks at random among ties at the edge: keep all of them, then order.
            edge = np.partition(values, n_targets - k)[n_targets - k]
            candidates = np.flatnonzero(values >= edge)
            order = np.argsort(-values[candidates], kind="stable")[:k]
            found[row] = candidates[order]
    return found
