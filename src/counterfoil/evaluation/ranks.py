"""Ranks by counting: a rank is the number of wrong answers that score at least as high.

Nothing is sorted. Ties count against the model, so one that scores everything equal ranks last,
not first; a query's other positives never count against it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.data.duplicates import images_of_groups
from counterfoil.errors import DataError
from counterfoil.evaluation.matrices import (
    Floats,
    Indices,
    ScoreMatrix,
    check_image_of,
    check_matrix,
    processors,
    read_cells,
    read_rows,
    row_chunks,
)
from counterfoil.evaluation.positives import Positives

TIE_RULE = "ties count against the model"

Counts = NDArray[np.int32]

# A chunk of scores and its mask stay in the processor's cache while they are counted twice.
CHUNK_CELLS = 400_000
# Columns are counted in bytes, so a chunk may have no more rows than a byte can count.
MAX_CHUNK_ROWS = 255
# Below this, starting threads costs more than it saves.
THREAD_CELLS = 2_000_000


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks from 0 of every query that has a positive, in both directions.

    ``i2t[q]`` belongs to image ``images[q]`` and ``t2i[q]`` to text ``texts[q]``; the queries that
    are missing there have no positive and were left out.
    """

    i2t: Counts
    t2i: Counts
    images: Indices
    texts: Indices
    n_images: int
    n_texts: int


def count_ranks(
    scores: ScoreMatrix, image_of: ArrayLike, *, chunk_rows: int | None = None
) -> Ranks:
    """Ranks of each image's best caption and of each caption's image, in one pass.

    >>> scores = np.array([[0.9, 0.1, 0.8], [0.2, 0.3, 0.8]])
    >>> found = count_ranks(scores, image_of=[0, 0, 1])
    >>> found.i2t.tolist(), found.t2i.tolist()
    ([0, 0], [0, 1, 1])
    """
    shape = check_matrix(scores)
    captions = Positives.from_image_of(check_image_of(image_of, shape), shape[0])
    return count_ranks_of(scores, captions, captions.transposed(), chunk_rows=chunk_rows)


def count_ranks_of(
    scores: ScoreMatrix, i2t: Positives, t2i: Positives, *, chunk_rows: int | None = None
) -> Ranks:
    """The same for any positives, which may differ between the directions."""
    n_images, n_texts = check_matrix(scores)
    i2t.check(n_images, n_texts, "image to text")
    t2i.check(n_texts, n_images, "text to image")
    if chunk_rows is not None and chunk_rows < 1:
        raise DataError(f"chunk_rows must be at least 1, got {chunk_rows}")
    row_best, row_own = best_positive(i2t, read_cells(scores, i2t.queries, i2t.targets))
    column_best, column_own = best_positive(t2i, read_cells(scores, t2i.targets, t2i.queries))
    rows, columns = _count_above(scores, row_best, column_best, chunk_rows)
    images, texts = np.flatnonzero(i2t.counts()), np.flatnonzero(t2i.counts())
    return Ranks(
        i2t=(rows - row_own)[images],
        t2i=(columns - column_own)[texts],
        images=images,
        texts=texts,
        n_images=n_images,
        n_texts=n_texts,
    )


def count_ranks_of_groups(
    scores: ScoreMatrix, image_of: Indices, groups: Indices, *, chunk_rows: int | None = None
) -> Ranks:
    """Ranks if a caption is right for every image that has a caption of its group.

    ``groups`` [n_texts] are equal for identical captions. If most images share a caption, nearly
    all pairs are positive: they are known a few rows at a time, in two passes over the scores.
    """
    n_images, n_texts = check_matrix(scores)
    right_of = _GroupPositives(image_of, groups, n_images)
    i2t, t2i = np.zeros(n_images, dtype=np.int32), np.zeros(n_texts, dtype=np.int32)
    best = np.full(n_texts, -np.inf)
    chunks = list(row_chunks(0, n_images, n_texts, CHUNK_CELLS, chunk_rows))
    for first, last in chunks:
        rows, right = read_rows(scores, first, last), right_of.rows(first, last)
        own = np.where(right, rows, -np.inf)
        reached = rows >= own.max(axis=1, initial=-np.inf)[:, None]
        i2t[first:last] = np.count_nonzero(reached & ~right, axis=1)
        np.maximum(best, own.max(axis=0, initial=-np.inf), out=best)
    for first, last in chunks:
        rows, right = read_rows(scores, first, last), right_of.rows(first, last)
        t2i += np.count_nonzero((rows >= best) & ~right, axis=0).astype(np.int32)
    images = np.flatnonzero(np.bincount(image_of, minlength=n_images))
    return Ranks(i2t[images], t2i, images, np.arange(n_texts), n_images, n_texts)


class _GroupPositives:
    """Which captions are right for some rows of images, by the groups of their own captions."""

    def __init__(self, image_of: Indices, groups: Indices, n_images: int) -> None:
        self.columns, self.size = groups, int(groups.max(initial=0)) + 1
        owned, owners = images_of_groups(groups, image_of)
        order = np.argsort(owners, kind="stable")
        self.owned, self.owners = owned[order], owners[order]

    def rows(self, first: int, last: int) -> NDArray[np.bool_]:
        span = slice(*np.searchsorted(self.owners, [first, last]))
        has = np.zeros((last - first, self.size), dtype=np.bool_)
        has[self.owners[span] - first, self.owned[span]] = True
        return has[:, self.columns]


def best_positive(positives: Positives, scores: Floats) -> tuple[Floats, Counts]:
    """Best positive score of each query, and how many of its positives reach it."""
    best = np.full(positives.n_queries, -np.inf, dtype=scores.dtype)
    np.maximum.at(best, positives.queries, scores)
    reached = positives.queries[scores >= best[positives.queries]]
    own = np.bincount(reached, minlength=positives.n_queries).astype(np.int32)
    return best, own


def _count_above(
    scores: ScoreMatrix, row_best: Floats, column_best: Floats, chunk_rows: int | None
) -> tuple[Counts, Counts]:
    """For each row and each column, how many scores reach the given one."""
    n_rows, n_columns = len(row_best), len(column_best)
    step = chunk_rows or max(1, CHUNK_CELLS // max(1, n_columns))
    step = min(step, MAX_CHUNK_ROWS, max(1, n_rows))
    row_counts = np.zeros(n_rows, dtype=np.int32)

    def count(start: int, stop: int) -> Counts:
        column_counts = np.zeros(n_columns, dtype=np.int32)
        mask = np.empty((step, n_columns), dtype=np.bool_)
        for first, last in row_chunks(start, stop, n_columns, CHUNK_CELLS, step):
            chunk = read_rows(scores, first, last)
            above = mask[: last - first]
            np.greater_equal(chunk, row_best[first:last, None], out=above)
            for row in range(last - first):
                row_counts[first + row] = np.count_nonzero(above[row])
            np.greater_equal(chunk, column_best, out=above)
            column_counts += above.view(np.uint8).sum(axis=0, dtype=np.uint8)
        return column_counts

    workers = processors() if n_rows * n_columns >= THREAD_CELLS else 1
    if workers == 1:
        return row_counts, count(0, n_rows)
    edges = np.linspace(0, n_rows, workers + 1).astype(int).tolist()
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(count, edges[:-1], edges[1:]))
    return row_counts, np.sum(parts, axis=0, dtype=np.int32)
