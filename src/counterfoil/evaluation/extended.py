"""mAP@R, R-precision and R@K with extended positives: pairs beyond the data set's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.evaluation.ranks import (
    STRIP_CELLS,
    Floats,
    Indices,
    Positives,
    ScoreMatrix,
    check_matrix,
    read_rows,
    row_chunks,
    transposed,
)
from counterfoil.evaluation.report import ExtendedDirection, ExtendedReport


@dataclass(frozen=True, eq=False)
class ExtendedPositives:
    """Positives of both directions; annotators may have judged these separately."""

    i2t: Positives
    t2i: Positives
    source: str = "extended"

    @classmethod
    def from_image_of(cls, image_of: ArrayLike, n_images: int) -> ExtendedPositives:
        """The data set's own pairs."""
        i2t = Positives.from_image_of(image_of, n_images)
        return cls(i2t, i2t.transposed(), source="pairs")

    @classmethod
    def from_pairs(
        cls, pairs: ArrayLike, n_images: int, n_texts: int, source: str = "extended"
    ) -> ExtendedPositives:
        """From rows (image, text) that are positive in both directions."""
        i2t = Positives.from_pairs(pairs, n_images, n_texts)
        return cls(i2t, i2t.transposed(), source=source)

    def union(self, other: ExtendedPositives) -> ExtendedPositives:
        """Pairs that are positive in either."""
        return ExtendedPositives(
            self.i2t.union(other.i2t), self.t2i.union(other.t2i), f"{self.source} + {other.source}"
        )


def extended_metrics(
    scores: ScoreMatrix, positives: ExtendedPositives, *, ks: Sequence[int] = (1, 5, 10)
) -> ExtendedReport:
    """mAP@R, R-precision and R@K (hit rate), in percent, of ``scores[image, text]``.

    R is the number of positives of a query (Musgrave et al. 2020; Chun et al. 2022, ECCV Caption).

    >>> right = ExtendedPositives.from_pairs([(0, 0), (0, 1), (1, 1)], n_images=2, n_texts=3)
    >>> report = extended_metrics(np.array([[0.9, 0.1, 0.5], [0.1, 0.8, 0.3]]), right, ks=(1,))
    >>> report.i2t.map_at_r, report.i2t.r_precision, report.t2i.left_out
    (75.0, 75.0, 1)
    """
    n_images, n_texts = check_matrix(scores)
    positives.i2t.check(n_images, n_texts, "image to text")
    positives.t2i.check(n_texts, n_images, "text to image")
    return ExtendedReport(
        source=positives.source,
        i2t=direction_metrics(scores, positives.i2t, ks),
        t2i=direction_metrics(transposed(scores), positives.t2i, ks),
    )


def direction_metrics(
    scores: ScoreMatrix,
    positives: Positives,
    ks: Sequence[int] = (1, 5, 10),
    *,
    chunk_rows: int | None = None,
) -> ExtendedDirection:
    """`extended_metrics` of one direction, with the queries as rows."""
    counts = positives.counts()
    n_queries = int(np.count_nonzero(counts))
    best = np.full(positives.n_queries, np.iinfo(np.int64).max)
    precision = np.zeros(positives.n_queries)
    within = np.zeros(positives.n_queries)
    depth = int(max(*ks, counts.max(initial=1)))
    for first, last in row_chunks(
        0, positives.n_queries, positives.n_targets, STRIP_CELLS, chunk_rows
    ):
        span = slice(*np.searchsorted(positives.queries, [first, last]))
        queries, targets = positives.queries[span], positives.targets[span]
        rows = read_rows(scores, first, last)
        order, ranks, queries = _positive_ranks(rows, queries - first, targets, depth)
        queries = queries + first
        np.minimum.at(best, queries, ranks)
        inside = ranks < counts[queries]
        np.add.at(within, queries[inside], 1.0)
        np.add.at(precision, queries[inside], (order[inside] + 1.0) / (ranks[inside] + 1.0))
    queried = counts > 0
    sizes = counts[queried]
    return ExtendedDirection(
        queries=n_queries,
        left_out=positives.n_queries - n_queries,
        positives=len(positives),
        map_at_r=_percent(precision[queried] / sizes),
        r_precision=_percent(within[queried] / sizes),
        recalls={int(k): _percent(best[queried] < k) for k in ks},
    )


def _positive_ranks(
    rows: Floats, queries: Indices, targets: Indices, depth: int
) -> tuple[Indices, Indices, Indices]:
    """Rank of each positive among its query's positives and among all targets, and its query.

    Ranks among all targets are exact below ``depth``, otherwise at least ``depth``.
    """
    scores = rows[queries, targets]
    by_score = np.lexsort((-scores, queries))
    scores, queries = scores[by_score], queries[by_score]
    starts = np.searchsorted(queries, queries)
    order = np.arange(len(queries)) - starts
    # Ties count against the model: a positive ranks behind every negative of equal score. Its rank
    # follows from how many targets, and how many positives among them, reach its score.
    depth = min(depth, rows.shape[1])
    best = np.partition(rows, rows.shape[1] - depth, axis=1)[:, rows.shape[1] - depth :]
    best.sort(axis=1)
    edge = best[:, 0]
    tied = np.count_nonzero(rows >= edge[:, None], axis=1)
    reach = np.empty(len(queries), dtype=np.int64)
    for first, last in pairwise([*np.flatnonzero(order == 0), len(queries)]):
        reach[first:last] = depth - np.searchsorted(best[queries[first]], scores[first:last])
    reach = np.where(scores > edge[queries], reach, tied[queries])
    own = _count_reaching(queries, scores, order)
    ranks = reach - own + order
    ranks[scores < edge[queries]] = rows.shape[1]
    return order, ranks, queries


def _count_reaching(queries: Indices, scores: Floats, order: Indices) -> Indices:
    """How many positives of the same query score at least as high; sorted by query and score."""
    if not len(queries):
        return order
    last_of_tie = np.append((queries[1:] != queries[:-1]) | (scores[1:] != scores[:-1]), True)
    ends = np.flatnonzero(last_of_tie)
    counts: Indices = order[ends[np.searchsorted(ends, np.arange(len(queries)))]] + 1
    return counts


def _percent(values: NDArray[np.floating] | NDArray[np.bool_]) -> float:
    return float(100.0 * np.mean(values)) if values.size else float("nan")
