"""Confidence intervals by resampling images together with their captions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

CHUNK_DRAWS = 1_000_000


def cluster_bootstrap(
    sums: Values, sizes: Values, resamples: int, rng: np.random.Generator
) -> Values:
    """Resampled means ``[resamples, n_metrics]`` of metrics known per cluster.

    ``sums[c, m]`` is the sum of metric ``m`` over the queries of cluster ``c`` and ``sizes[c, m]``
    their number. Captions of one image are not independent, so whole images are drawn.

    >>> hits = np.array([[1.0], [0.0]])
    >>> means = cluster_bootstrap(hits, np.ones((2, 1)), 400, np.random.default_rng(0))
    >>> sorted(set(means[:, 0].tolist()))
    [0.0, 0.5, 1.0]
    """
    n_clusters = len(sums)
    means = np.empty((resamples, sums.shape[1]))
    step = max(1, CHUNK_DRAWS // max(1, n_clusters))
    for first in range(0, resamples, step):
        count = min(step, resamples - first)
        drawn = rng.integers(0, n_clusters, size=(count, n_clusters), dtype=np.int64)
        drawn += np.arange(count)[:, None] * n_clusters
        weights = np.bincount(drawn.ravel(), minlength=count * n_clusters)
        weights = weights.reshape(count, n_clusters).astype(np.float64)
        means[first : first + count] = (weights @ sums) / (weights @ sizes)
    return means


def interval(means: Values, level: float = 0.95) -> tuple[float, float]:
    """The percentile interval of resampled means."""
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return float(low), float(high)
