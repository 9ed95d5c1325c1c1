"""`Vectors`: what the first stage compares, one vector an item or several; and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.storage.segments import Ids

Floats = NDArray[np.float32]
HALF_MAX = 65504.0

CACHE_FLOATS = 1 << 18
"""Numbers brought to float32 at once: few enough to be multiplied before they leave the cache."""


@dataclass(frozen=True)
class Vectors:
    """Vectors ``rows`` [R, D] of some items, one item after another, ``lengths`` [n] of them each.

    The score of two items is MaxSim: for every vector of the query its largest inner product with
    those of the item, summed. With one vector each, that is their inner product.
    """

    rows: Floats
    lengths: Ids

    @classmethod
    def single(cls, rows: ArrayLike) -> Vectors:
        """One vector an item."""
        array = np.atleast_2d(np.asarray(rows, dtype=np.float32))
        return cls(array, np.ones(len(array), dtype=np.int64))

    @classmethod
    def several(cls, items: Sequence[ArrayLike]) -> Vectors:
        """Any number of vectors, at least one, an item."""
        arrays = [np.atleast_2d(np.asarray(item, dtype=np.float32)) for item in items]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        rows = np.concatenate(arrays) if arrays else np.empty((0, 0), dtype=np.float32)
        return cls(rows, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Ids:
        found: Ids = np.cumsum(self.lengths) - self.lengths
        return found

    def __iter__(self) -> Iterator[Floats]:
        for start, length in zip(self.starts, self.lengths, strict=True):
            yield self.rows[start : start + length]

    def __getitem__(self, items: slice) -> Vectors:
        lengths = self.lengths[items]
        starts = self.starts[items]
        first = int(starts[0]) if len(starts) else 0
        return Vectors(self.rows[first : first + int(lengths.sum())], lengths)


def checked(vectors: Vectors, dim: int, multi: bool, dtype: str = "float32") -> Vectors:
    """The same vectors, or a `DataError` that says why they cannot be in an index."""
    if not len(vectors):
        return vectors
    if vectors.rows.shape[1] != dim:
        raise DataError(f"this index holds vectors of {dim} numbers, got {vectors.rows.shape[1]}")
    if vectors.lengths.min() < 1 or (not multi and vectors.lengths.max() > 1):
        wanted = "at least one vector" if multi else "exactly one vector"
        raise DataError(f"this index takes {wanted} an item")
    limit = HALF_MAX if dtype == "float16" else np.finfo(np.float32).max
    with np.errstate(invalid="ignore"):
        good = (np.abs(vectors.rows) <= limit).all(axis=1)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        item = int(np.searchsorted(np.cumsum(vectors.lengths), row, side="right"))
        raise DataError(f"vector of item {item}: a number in it is not finite in {dtype}")
    return vectors


def checked_ids(ids: ArrayLike, vectors: Vectors | None = None) -> Ids:
    """Item ids: distinct and not negative, one for each item."""
    found: NDArray[Any] = np.asarray(ids)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise DataError(f"item ids are a list of whole numbers, got {found.dtype} {found.shape}")
    if len(found) and found.min() < 0:
        raise DataError(f"item ids are not negative, got {int(found.min())}")
    if len(np.unique(found)) < len(found):
        raise DataError("an item id stands twice in one call")
    if vectors is not None and len(found) != len(vectors):
        raise DataError(f"{len(found)} item ids for the vectors of {len(vectors)} items")
    return found.astype(np.int64)


class TopK:
    """The ``k`` best items of each query so far; among equal scores the lower id is first."""

    def __init__(self, queries: int, k: int) -> None:
        if k < 1:
            raise DataError(f"k must be at least 1, got {k}")
        self.k = k
        self._ids = [np.empty(0, dtype=np.int64)] * queries
        self._scores = [np.empty(0, dtype=np.float32)] * queries

    def update(self, ids: Ids, scores: Tensor) -> None:
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
            self.insert(query, ids[places.numpy()], row[places].numpy())

    def insert(self, query: int, ids: Ids, scores: Floats) -> None:
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
    step = max(1, CACHE_FLOATS // rows.shape[1])
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
