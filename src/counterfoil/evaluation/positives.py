"""`Positives`: which targets are right for which query, as a sparse boolean matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from counterfoil.errors import DataError
from counterfoil.evaluation.matrices import Indices


@dataclass(frozen=True, eq=False)
class Positives:
    """Pairs (``queries[p]``, ``targets[p]``) in order of query, each pair once.

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
        """The captions of each image: positives of the direction image to text."""
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
        """The same pairs asked the other way round."""
        return Positives.from_pairs(self.pairs()[:, ::-1], self.n_targets, self.n_queries)

    def union(self, other: Positives) -> Positives:
        """Pairs that are positive in either."""
        pairs = np.concatenate([self.pairs(), other.pairs()])
        return Positives.from_pairs(pairs, self.n_queries, self.n_targets)

    def without_diagonal(self) -> Positives:
        """All pairs but those of an item with itself."""
        keep = self.queries != self.targets
        return Positives(self.queries[keep], self.targets[keep], self.n_queries, self.n_targets)

    def check(self, n_queries: int, n_targets: int, where: str) -> None:
        """Raise where these positives are not those of a matrix of the given sizes."""
        if (self.n_queries, self.n_targets) != (n_queries, n_targets):
            raise DataError(
                f"{where}: positives are of {self.n_queries} queries and {self.n_targets} "
                f"targets, scores of {n_queries} and {n_targets}"
            )
