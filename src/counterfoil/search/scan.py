"""Scores of a block of items, and the best of many blocks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.errors import DataError
from counterfoil.search.table import Ids
from counterfoil.search.vectors import Floats, Vectors

IN_CACHE = 1 << 18
"""Numbers brought to float32 at once: few enough to be multiplied before they leave the cache."""


class Best:
    """The ``k`` best items of each query so far; among equal scores the lower id is first."""

    def __init__(self, queries: int, k: int) -> None:
        if k < 1:
            raise DataError(f"k must be at least 1, got {k}")
        self.k = k
        self._ids = [np.empty(0, dtype=np.int64)] * queries
        self._scores = [np.empty(0, dtype=np.float32)] * queries

    def offer(self, ids: Ids, scores: Tensor) -> None:
        """Scores [Q, B] of the items ``ids`` [B]; −∞ is no item."""
        if not len(ids) or not len(self._ids):
            return
        edges = scores.topk(min(self.k, len(ids)), dim=1).values[:, -1].tolist()
        for query, edge in enumerate(edges):
            held = self._scores[query]
            if len(held) == self.k:
                edge = max(edge, float(held[-1]))
            row = scores[query]
            places = torch.nonzero((row >= edge) & (row > -torch.inf)).squeeze(1)
            if not len(places):
                continue
            self.hold(query, ids[places.numpy()], row[places].numpy())

    def hold(self, query: int, ids: Ids, scores: Floats) -> None:
        """Items of one query, each of them once, in any order."""
        found = np.concatenate([self._scores[query], scores])
        names = np.concatenate([self._ids[query], ids])
        order = np.lexsort((names, -found))[: self.k]
        self._scores[query], self._ids[query] = found[order], names[order]

    def result(self) -> tuple[Ids, Floats]:
        """Ids and scores [Q, up to k], best first; a short row ends in id −1, score −∞."""
        width = max((len(row) for row in self._ids), default=0)
        ids = np.full((len(self._ids), width), -1, dtype=np.int64)
        scores = np.full((len(self._ids), width), -np.inf, dtype=np.float32)
        for query, (names, values) in enumerate(zip(self._ids, self._scores, strict=True)):
            ids[query, : len(names)], scores[query, : len(values)] = names, values
        return ids, scores


def max_sim(queries: Vectors, rows: Tensor, lengths: NDArray[np.int64] | None) -> Tensor:
    """MaxSim [Q, B] of queries with the items of a block; ``lengths`` is None for one vector each.

    ``rows`` [R, D] are in any precision; the sums are in float32.
    """
    asked = torch.from_numpy(np.ascontiguousarray(queries.rows))
    sims = torch.empty(len(asked), len(rows))  # [vectors of the queries, R]
    step = max(1, IN_CACHE // rows.shape[1])
    buffer = torch.empty(min(step, len(rows)), rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if part.dtype != torch.float32:
            part = buffer[: len(part)].copy_(part)
        torch.mm(asked, part.T, out=sims[:, start : start + step])
    if lengths is not None:
        starts = np.cumsum(lengths) - lengths
        sims = torch.from_numpy(np.maximum.reduceat(sims.numpy(), starts, axis=1))
    if len(queries.rows) == len(queries):
        return sims
    return torch.from_numpy(np.add.reduceat(sims.numpy(), queries.starts, axis=0))
