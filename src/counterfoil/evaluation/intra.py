"""Image-to-image and text-to-text retrieval from self-similarities, as CxC measures it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from counterfoil.errors import DataError
from counterfoil.evaluation.matrices import (
    Floats,
    ScoreMatrix,
    as_floats,
    check_matrix,
    read_rows,
    row_chunks,
)
from counterfoil.evaluation.positives import Positives
from counterfoil.evaluation.ranks import Counts, best_positive
from counterfoil.evaluation.report import Report

CHUNK_CELLS = 2_000_000


class IntraReport(Report):
    """Hit rates, in percent, of retrieval within one modality."""

    queries: int
    left_out: int
    recalls: dict[int, float]


class Products:
    """Dot products of two sets of vectors, computed as their rows are read.

    The self-similarity of 25,000 captions fills 2.5 GB; this fills nothing.

    >>> Products(np.eye(2), np.eye(2))[0:1].tolist()
    [[1.0, 0.0]]
    """

    def __init__(self, queries: Any, targets: Any) -> None:
        self.queries, self.targets = as_floats(queries), as_floats(targets)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.queries), len(self.targets)

    def __getitem__(self, key: slice, /) -> Floats:
        rows: Floats = self.queries[key] @ self.targets.T
        return rows


def sibling_positives(image_of: ArrayLike) -> Positives:
    """Captions of one image are each other's positives, no caption its own.

    >>> sibling_positives([0, 0, 1]).pairs().tolist()
    [[0, 1], [1, 0]]
    """
    owners = np.asarray(image_of, dtype=np.int64)
    by_owner = np.argsort(owners, kind="stable")
    groups = np.split(by_owner, np.flatnonzero(np.diff(owners[by_owner])) + 1)
    pairs = [np.stack(np.meshgrid(group, group), axis=-1).reshape(-1, 2) for group in groups]
    texts = len(owners)
    return Positives.from_pairs(np.concatenate(pairs), texts, texts).without_diagonal()


def intra_recalls(
    similarities: ScoreMatrix,
    positives: Positives,
    *,
    ks: Sequence[int] = (1, 5, 10),
    chunk_rows: int | None = None,
) -> IntraReport:
    """R@K of a square matrix; no item is its own candidate; queries without positives are skipped.

    >>> alike = Positives.from_pairs([(0, 1), (1, 0)], 3, 3)
    >>> intra_recalls(np.eye(3) + [[0, 0.5, 0.1]] * 3, alike, ks=(1,)).recalls
    {1: 50.0}
    """
    ranks = self_ranks(similarities, positives, chunk_rows=chunk_rows)
    return IntraReport(
        queries=len(ranks),
        left_out=positives.n_queries - len(ranks),
        recalls={
            int(k): float(100.0 * np.mean(ranks < k)) if len(ranks) else float("nan") for k in ks
        },
    )


def self_ranks(
    similarities: ScoreMatrix, positives: Positives, *, chunk_rows: int | None = None
) -> Counts:
    """Ranks from 0 of the best positive of each query that has one, the query itself set aside."""
    size, width = check_matrix(similarities)
    if size != width:
        raise DataError(f"self-similarities must be square, got {size} x {width}")
    positives.check(size, size, "self-similarities")
    positives = positives.without_diagonal()
    ranks = np.zeros(size, dtype=np.int32)
    for first, last in row_chunks(0, size, size, CHUNK_CELLS, chunk_rows):
        rows = read_rows(similarities, first, last)
        span = slice(*np.searchsorted(positives.queries, [first, last]))
        queries, targets = positives.queries[span] - first, positives.targets[span]
        chunk = Positives(queries, targets, last - first, size)
        best, own = best_positive(chunk, rows[queries, targets])
        itself = rows[np.arange(last - first), np.arange(first, last)] >= best
        ranks[first:last] = np.count_nonzero(rows >= best[:, None], axis=1) - own - itself
    return ranks[positives.counts() > 0]
