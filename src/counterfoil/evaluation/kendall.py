"""Kendall's rank correlation with ties, τ-b and τ-c, in O(n log n)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.errors import DataError

SMALL = 64


@dataclass(frozen=True)
class Concordance:
    """Pairs of items by how two orders agree on them.

    ``lead`` is concordant less discordant pairs; ``tied_x`` and ``tied_y`` count pairs that are
    equal in one order (in both alike), ``levels`` the distinct values of the one that has fewer.
    """

    items: int
    lead: int
    tied_x: int
    tied_y: int
    levels: int

    @property
    def tau_b(self) -> float:
        """Kendall's τ-b: of the pairs that are tied in neither, with both kinds of ties counted."""
        pairs = self.items * (self.items - 1) // 2
        whole = sqrt((pairs - self.tied_x) * (pairs - self.tied_y))
        return self.lead / whole if whole else float("nan")

    @property
    def tau_c(self) -> float:
        """Stuart's τ-c, for two scales with different numbers of levels."""
        if self.levels < 2:
            return float("nan")
        return 2 * self.lead / (self.items**2 * (self.levels - 1) / self.levels)


def concordance(x: ArrayLike, y: ArrayLike) -> Concordance:
    """Compare two orders of the same items; after Knight (1966), by counting inversions.

    >>> round(concordance([1, 2, 3, 4], [1, 3, 2, 4]).tau_b, 3)
    0.667
    """
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise DataError(f"correlation: {first.shape} values against {second.shape}")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise DataError("correlation: a value is not a finite number")
    a, b = _ranks(first), _ranks(second)
    count = len(a)
    order = np.lexsort((b, a))  # by the first; among equals by the second, which adds no inversion
    discordant = inversions(b[order])
    both = a * np.int64(count + 1) + b
    tied_x, tied_y, tied_both = _tied(a), _tied(b), _tied(both)
    untied = count * (count - 1) // 2 - tied_x - tied_y + tied_both
    levels = min(len(np.unique(a)), len(np.unique(b)))
    return Concordance(count, untied - 2 * discordant, tied_x, tied_y, levels)


def inversions(values: NDArray[np.int64]) -> int:
    """Pairs that stand in the wrong order, equal ones not counted.

    >>> inversions(np.array([3, 1, 2, 2]))
    3
    """
    return _sort_and_count(np.asarray(values, dtype=np.int64))[1]


def _sort_and_count(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    if len(values) <= SMALL:
        wrong = np.triu(values[:, None] > values[None, :], 1)
        return np.sort(values), int(wrong.sum())
    middle = len(values) // 2
    left, in_left = _sort_and_count(values[:middle])
    right, in_right = _sort_and_count(values[middle:])
    across = len(left) * len(right) - int(np.searchsorted(left, right, side="right").sum())
    return np.sort(np.concatenate([left, right]), kind="stable"), in_left + in_right + across


def _ranks(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _tied(values: NDArray[np.int64]) -> int:
    counts = np.unique(values, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())
