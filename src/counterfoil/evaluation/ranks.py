"""Ranks of positives in score matrices, by counting the negatives that score at least as high.

Nothing is sorted. Ties count against the model, so a model that scores all pairs equal ranks last.
A query's other positives never count against it. Score matrices (numpy, memory-mapped or torch)
are read a few rows at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.parallel import usable_cores
from counterfoil.data.duplicates import images_of_groups

Floats = NDArray[np.floating[Any]]
Values = NDArray[np.float64]
Indices = NDArray[np.int64]

TIE_RULE = "ties count against the model"
Counts = NDArray[np.int32]

# A chunk of scores and its mask fit in the CPU cache, as they are counted twice.
CHUNK_CELLS = 400_000

# Columns are counted in uint8, so a chunk has at most 255 rows.
MAX_CHUNK_ROWS = 255

# Fewer cells are not worth the start of threads.
THREAD_CELLS = 2_000_000

# Larger than CHUNK_CELLS: reading a transposed matrix is faster in wide strips.
STRIP_CELLS = 2_000_000


class ScoreMatrix(Protocol):
    """Scores ``[n_queries, n_targets]``: a numpy array, a ``memmap``, a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def as_floats(part: Any) -> Floats:
    """Part of a matrix as a contiguous float32 or float64 array; half precision becomes float32."""
    # Looked up, not imported: a caller with a tensor has already imported torch.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        if part.dtype in (torch.float16, torch.bfloat16):
            part = part.float()
        part = part.numpy()
    array = np.asarray(part)
    if array.dtype in (np.float32, np.float64):
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(array, dtype=np.float32 if array.dtype == np.float16 else float)


def read_rows(scores: ScoreMatrix, start: int, stop: int) -> Floats:
    """Rows ``start`` to ``stop`` of ``scores``, or an error that names the first NaN in them."""
    rows = as_floats(scores[start:stop])
    # The maximum is NaN if any value is, and needs one fast pass.
    if rows.size and np.isnan(rows.max()):
        row, column = np.argwhere(np.isnan(rows))[0]
        raise DataError(
            f"score matrix {tuple(scores.shape)} has NaN at row {start + row}, column {column}: "
            "a model that scores NaN cannot be ranked; look for a division by a zero norm"
        )
    return rows


def row_chunks(
    start: int, stop: int, width: int, cells: int, rows: int | None = None
) -> Iterator[tuple[int, int]]:
    """Split rows into chunks of about ``cells`` cells, or of ``rows`` rows if given."""
    step = rows if rows is not None else max(1, cells // max(1, width))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def check_matrix(scores: ScoreMatrix) -> tuple[int, int]:
    """The shape of a score matrix; raises a `DataError` if it has not two dimensions."""
    if len(getattr(scores, "shape", ())) != 2:
        raise DataError(f"scores must be a matrix [n_images, n_texts], got {_shape_of(scores)}")
    return int(scores.shape[0]), int(scores.shape[1])


def _shape_of(scores: object) -> str:
    if not hasattr(scores, "shape"):
        return f"{type(scores).__name__}; convert it with np.array or torch.tensor"
    return f"shape {tuple(scores.shape)}"


def check_image_of(image_of: ArrayLike, shape: tuple[int, int]) -> Indices:
    """``image_of`` as valid indices: one row of the matrix per column."""
    indices = np.asarray(image_of)
    if indices.shape != (shape[1],):
        raise DataError(
            f"image_of must name the image of each of the {shape[1]} texts, "
            f"got shape {indices.shape}"
        )
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise DataError(f"image_of must hold integers, got {indices.dtype}")
    wrong = np.flatnonzero((indices < 0) | (indices >= shape[0]))
    if wrong.size:
        raise DataError(
            f"image_of[{wrong[0]}] is {indices[wrong[0]]}, but the matrix has {shape[0]} images"
        )
    return indices.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Positives:
    """Positive pairs (``queries[p]``, ``targets[p]``), sorted by query, without duplicates.

    >>> right = Positives.from_pairs([(1, 0), (0, 2), (1, 0)], n_queries=3, n_targets=4)
    >>> right.counts().tolist()
    [1, 1, 0]
    >>> right.transposed().counts().tolist()
    [1, 0, 1, 0]
    """

    queries: Indices
    targets: Indices
    n_queries: int
    n_targets: int

    @classmethod
    def from_pairs(cls, pairs: ArrayLike, n_queries: int, n_targets: int) -> Positives:
        """Positives from rows (query, target), in any order."""
        array = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        for column, size, what in ((0, n_queries, "query"), (1, n_targets, "target")):
            wrong = np.flatnonzero((array[:, column] < 0) | (array[:, column] >= size))
            if wrong.size:
                raise DataError(
                    f"positive pair {wrong[0]} names {what} {array[wrong[0], column]}, "
                    f"but there are {size}"
                )
        keys = np.unique(array[:, 0] * max(1, n_targets) + array[:, 1])
        queries, targets = np.divmod(keys, max(1, n_targets))
        return cls(queries, targets, n_queries, n_targets)

    @classmethod
    def from_image_of(cls, image_of: ArrayLike, n_images: int) -> Positives:
        """The captions of each image as positives for image to text."""
        images = np.asarray(image_of, dtype=np.int64)
        texts = np.arange(len(images), dtype=np.int64)
        return cls.from_pairs(np.stack([images, texts], axis=1), n_images, len(images))

    def __len__(self) -> int:
        return len(self.queries)

    def pairs(self) -> Indices:
        """Rows (query, target)."""
        return np.stack([self.queries, self.targets], axis=1)

    def counts(self) -> Indices:
        """Number of positives of each query."""
        return np.bincount(self.queries, minlength=self.n_queries).astype(np.int64)

    def transposed(self) -> Positives:
        """The same pairs with queries and targets swapped."""
        return Positives.from_pairs(self.pairs()[:, ::-1], self.n_targets, self.n_queries)

    def union(self, other: Positives) -> Positives:
        """Pairs that are positive in either."""
        pairs = np.concatenate([self.pairs(), other.pairs()])
        return Positives.from_pairs(pairs, self.n_queries, self.n_targets)

    def check(self, n_queries: int, n_targets: int, where: str) -> None:
        """Raise if these positives do not belong to a matrix of the given shape."""
        if (self.n_queries, self.n_targets) != (n_queries, n_targets):
            raise DataError(
                f"{where}: positives are of {self.n_queries} queries and {self.n_targets} "
                f"targets, scores of {n_queries} and {n_targets}"
            )


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks, counted from 0, of every query with a positive, in both directions.

    ``i2t[q]`` belongs to image ``images[q]`` and ``t2i[q]`` to text ``texts[q]``; queries without a
    positive are omitted.
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
    >>> ranks = count_ranks(scores, image_of=[0, 0, 1])
    >>> ranks.i2t.tolist(), ranks.t2i.tolist()
    ([0, 0], [0, 1, 1])
    """
    shape = check_matrix(scores)
    captions = Positives.from_image_of(check_image_of(image_of, shape), shape[0])
    return count_ranks_of(scores, captions, captions.transposed(), chunk_rows=chunk_rows)


def count_ranks_of(
    scores: ScoreMatrix, i2t: Positives, t2i: Positives, *, chunk_rows: int | None = None
) -> Ranks:
    """`count_ranks` for any positives, which may differ between the directions."""
    n_images, n_texts = check_matrix(scores)
    i2t.check(n_images, n_texts, "image to text")
    t2i.check(n_texts, n_images, "text to image")
    if chunk_rows is not None and chunk_rows < 1:
        raise DataError(f"chunk_rows must be at least 1, got {chunk_rows}")
    row_best, row_own = _best_positive(i2t, scores[i2t.queries, i2t.targets])
    column_best, column_own = _best_positive(t2i, scores[t2i.targets, t2i.queries])
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
    all pairs are positive. Masks of a few rows save memory and need two passes over the scores.
    """
    n_images, n_texts = check_matrix(scores)
    positives = _GroupPositives(image_of, groups)
    i2t, t2i = np.zeros(n_images, dtype=np.int32), np.zeros(n_texts, dtype=np.int32)
    best = np.full(n_texts, -np.inf)
    chunks = list(row_chunks(0, n_images, n_texts, CHUNK_CELLS, chunk_rows))
    for first, last in chunks:
        rows, right = read_rows(scores, first, last), positives.rows(first, last)
        own = np.where(right, rows, -np.inf)
        reached = rows >= own.max(axis=1, initial=-np.inf)[:, None]
        i2t[first:last] = np.count_nonzero(reached & ~right, axis=1)
        np.maximum(best, own.max(axis=0, initial=-np.inf), out=best)
    for first, last in chunks:
        rows, right = read_rows(scores, first, last), positives.rows(first, last)
        t2i += np.count_nonzero((rows >= best) & ~right, axis=0).astype(np.int32)
    images = np.flatnonzero(np.bincount(image_of, minlength=n_images))
    return Ranks(i2t[images], t2i, images, np.arange(n_texts), n_images, n_texts)


class _GroupPositives:
    """Masks of the positives of images, from the groups of their own captions."""

    def __init__(self, image_of: Indices, groups: Indices) -> None:
        self.columns, self.size = groups, int(groups.max(initial=0)) + 1
        owned, owners = images_of_groups(groups, image_of)
        order = np.argsort(owners, kind="stable")
        self.owned, self.owners = owned[order], owners[order]

    def rows(self, first: int, last: int) -> NDArray[np.bool_]:
        span = slice(*np.searchsorted(self.owners, [first, last]))
        has = np.zeros((last - first, self.size), dtype=np.bool_)
        has[self.owners[span] - first, self.owned[span]] = True
        return has[:, self.columns]


def _best_positive(positives: Positives, cells: Any) -> tuple[Floats, Counts]:
    """Best of the scores ``cells`` [positives] per query, and how many positives reach it."""
    scores = as_floats(cells)
    best = np.full(positives.n_queries, -np.inf, dtype=scores.dtype)
    np.maximum.at(best, positives.queries, scores)
    reached = positives.queries[scores >= best[positives.queries]]
    own = np.bincount(reached, minlength=positives.n_queries).astype(np.int32)
    return best, own


def _count_above(
    scores: ScoreMatrix, row_best: Floats, column_best: Floats, chunk_rows: int | None
) -> tuple[Counts, Counts]:
    """Per row and per column, the number of scores that reach the given threshold."""
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

    # Beyond 8 threads, memory bandwidth is the limit.
    workers = min(8, usable_cores()) if n_rows * n_columns >= THREAD_CELLS else 1
    if workers == 1:
        return row_counts, count(0, n_rows)
    edges = np.linspace(0, n_rows, workers + 1).astype(int).tolist()
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(count, edges[:-1], edges[1:]))
    return row_counts, np.sum(parts, axis=0, dtype=np.int32)


def transposed(scores: Any) -> ScoreMatrix:
    """The transposed matrix as a view: texts as queries, images as targets."""
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
    best = np.empty((n_queries, k), dtype=np.int64)
    for first, last in row_chunks(0, n_queries, n_targets, STRIP_CELLS, chunk_rows):
        rows = read_rows(scores, first, last)
        for row, values in enumerate(rows, start=first):
            # argpartition picks arbitrarily among ties at the edge, so sort all of them.
            edge = np.partition(values, n_targets - k)[n_targets - k]
            candidates = np.flatnonzero(values >= edge)
            order = np.argsort(-values[candidates], kind="stable")[:k]
            best[row] = candidates[order]
    return best
