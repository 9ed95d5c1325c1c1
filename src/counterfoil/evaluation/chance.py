"""What a random ranking would score: the floor that every recall stands on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def chance_recall(counts: ArrayLike, n_targets: int, k: int) -> float:
    """Expected hit rate at ``k``, in percent, for queries with the given numbers of positives.

    A query with c positives among n misses with probability C(n - c, k) / C(n, k). Queries without
    positives are left out.

    >>> chance_recall([1, 1], n_targets=4, k=1)
    25.0
    >>> round(chance_recall([5] * 1000, n_targets=5000, k=10), 3)
    0.996
    """
    positives = np.asarray(counts, dtype=np.float64)
    positives = positives[positives > 0]
    if not positives.size:
        return float("nan")
    draws = np.arange(min(k, n_targets))
    left = np.maximum(n_targets - positives[:, None] - draws, 0.0)
    missed = np.prod(left / (n_targets - draws), axis=1)
    return float(100.0 * np.mean(1.0 - missed))
