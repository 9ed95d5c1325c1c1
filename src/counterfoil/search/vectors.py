"""`Vectors` of items for the first stage (one or several per item), MaxSim and `TopK`."""

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
"""Numbers converted to float32 at once; they fit in the CPU cache."""


@dataclass(frozen=True)
class Vectors:
    """Vectors ``rows`` [R, D] of n items in order; item ``k`` has ``lengths[k]`` of them.

    The score of two items is MaxSim: for every vector of the query its largest inner product with
    those of the item, summed. With one vector each, that is their inner product.
    """

    rows: Floats
    lengths: Ids

    @classmethod
    def single(cls, rows: ArrayLike) -> Vectors:
        """From one vector per item."""
        array = np.atleast_2d(np.asarray(rows, dtype=np.float32))
        return cls(array, np.ones(len(array), dtype=np.int64))

    @classmethod
    def several(cls, items: Sequence[ArrayLike]) -> Vectors:
        """Any number of vectors, at least one, an item."""
        arrays = [np.atleast_2d(np.asarray(item, dtype=np.float32)) for item in items]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        rows = np.concatenate(arrays) if arrays else np.empty((0, 0), dtype=np.float32)
        return cls(rows, lengths)

    @classmethod
    def cat(cls, parts: Sequence[Vectors]) -> Vectors:
        """The items of all parts."""
        rows = np.concatenate([part.rows for part in parts])
        return cls(rows, np.concatenate([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Ids:
        starts: Ids = np.cumsum(self.lengths) - self.lengths
        return starts

    def __iter__(self) -> Iterator[Floats]:
        for start, length in zip(self.starts, self.lengths, strict=True):
            yield self.rows[start : start + length]

    def __getitem__(self, items: slice) -> Vectors:
        lengths = self.lengths[items]
        starts = self.starts[items]
        first = int(starts[0]) if len(starts) else 0
        return Vectors(self.rows[first : first + int(lengths.sum())], lengths)


def checked(vectors: Vectors, dim: int, multi: bool, dtype: str = "float32") -> Vectors:
    """The vectors; raises a `DataError` if they cannot be in an index."""
    if not len(vectors):
        return vectors
    if vectors.rows.shape[1] != dim:
        raise DataError(f"this index holds vectors of {dim} numbers, got {vectors.rows.shape[1]}")
    if vectors.lengths.min() < 1 or (not multi and vectors.lengths.max() > 1):
        wanted = "at least one vector" if multi else "exactly one vector"
        raise DataError(f"this index takes {wanted} per item")
    limit = HALF_MAX if dtype == "float16" else np.finfo(np.float32).max
    with np.errstate(invalid="ignore"):
        good = (np.abs(vectors.rows) <= limit).all(axis=1)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        item = int(np.searchsorted(np.cumsum(vectors.lengths), row, side="right"))
        raise DataError(f"vector of item {item}: a number in it is not finite in {dtype}")
    return vectors


def checked_ids(ids: ArrayLike, vectors: Vectors | None = None) -> Ids:
    """Valid item ids: distinct, not negative, one per item."""
    array: NDArray[Any] = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise DataError(f"item ids are a list of whole numbers, got {array.dtype} {array.shape}")
    if len(array) and array.min() < 0:
        raise DataError(f"item ids are not negative, got {int(array.min())}")
    if len(np.unique(array)) < len(array):
        raise DataError("an item id stands twice in one call")
    if vectors is not None and len(array) != len(vectors):
        raise DataError(f"{len(array)} item ids for the vectors of {len(vectors)} items")
    return array.astype(np.int64)


class TopK:
    """The ``k`` best items of each query so far; among equal scores the lower id is first."""

    def __init__(self, queries: int, k: int) -> None:
        if k < 1:
            raise DataError(f"k must be at least 1, got {k}")
        self.k = k
        self._ids = [np.empty(0, dtype=np.int64)] * queries
        self._scores = [np.empty(0, dtype=np.float32)] * queries

    def update(self, ids: Ids, scores: Tensor) -> None:
        """Add scores [Q, B] of the items ``ids`` [B]; −∞ marks no item."""
        if not len(ids) or not len(self._ids):
            return
        edges = scores.topk(min(self.k, len(ids)), dim=1).values[:, -1].tolist()
        for query, edge in enumerate(edges):
            current = self._scores[query]
            if len(current) == self.k:
                edge = max(edge, float(current[-1]))
            row = scores[query]
            columns = torch.nonzero((row >= edge) & (row > -torch.inf)).squeeze(1)
            if not len(columns):
                continue
            self.insert(query, ids[columns.numpy()], row[columns].numpy())

    def insert(self, query: int, ids: Ids, scores: Floats) -> None:
        """Add distinct items of one query, in any order."""
        all_scores = np.concatenate([self._scores[query], scores])
        all_ids = np.concatenate([self._ids[query], ids])
        order = np.lexsort((all_ids, -all_scores))[: self.k]
        self._scores[query], self._ids[query] = all_scores[order], all_ids[order]

    def result(self) -> tuple[Ids, Floats]:
        """Ids and scores [Q, up to k], best first; a short row ends in id −1, score −∞."""
        width = max((len(row) for row in self._ids), default=0)
        ids = np.full((len(self._ids), width), -1, dtype=np.int64)
        scores = np.full((len(self._ids), width), -np.inf, dtype=np.float32)
        for query, (names, values) in enumerate(zip(self._ids, self._scores, strict=True)):
            ids[query, : len(names)], scores[query, : len(values)] = names, values
        return ids, scores


def max_sim(sims: Tensor, queries: Vectors, lengths: NDArray[np.int64] | None) -> Tensor:
    """MaxSim [Q, B] from inner products [vectors of the queries, vectors of the items].

    ``lengths`` [B] are the numbers of vectors of the items; None: one each.
    """
    if lengths is not None:
        starts = np.cumsum(lengths) - lengths
        sims = torch.from_numpy(np.maximum.reduceat(sims.numpy(), starts, axis=1))
    if len(queries.rows) == len(queries):
        return sims
    return torch.from_numpy(np.add.reduceat(sims.numpy(), queries.starts, axis=0))
