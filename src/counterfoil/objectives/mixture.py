"""A mixture of two Gaussians on a line, by expectation maximisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def clean_probability(
    losses: NDArray[np.floating],
    *,
    iterations: int = 10,
    tolerance: float = 1e-2,
    least_variance: float = 5e-4,
) -> Floats:
    """How likely each loss belongs to the lower of two Gaussians (NCR's division of pairs).

    Losses are first brought to 0 … 1. The two start at the means of a two-means split; the fit
    ends when the mean log-likelihood grows by less than ``tolerance``. Where all losses are equal
    there is nothing to divide, and every pair is taken for clean.
    """
    values = np.asarray(losses, dtype=np.float64)
    if not len(values) or np.ptp(values) < 1e-12:
        return np.ones(len(values))
    values = (values - values.min()) / np.ptp(values)
    upper = _two_means(values)
    share = np.stack([~upper, upper], axis=1).astype(np.float64)
    before = -np.inf
    for _ in range(iterations):
        weights, means, variances = _maximise(values, share, least_variance)
        share, likelihood = _expect(values, weights, means, variances)
        if abs(likelihood - before) < tolerance:
            break
        before = likelihood
    return np.asarray(share[:, int(np.argmin(means))])


def _two_means(values: Floats) -> NDArray[np.bool_]:
    """Which values lie nearer to the higher of two centres; both centres are always used."""
    low, high = 0.0, 1.0
    for _ in range(100):
        upper = values > (low + high) / 2
        centres = values[~upper].mean(), values[upper].mean()
        if centres == (low, high):
            break
        low, high = centres
    return upper


def _maximise(values: Floats, share: Floats, least: float) -> tuple[Floats, Floats, Floats]:
    count = share.sum(0) + 1e-12
    means = (share * values[:, None]).sum(0) / count
    variances = (share * (values[:, None] - means) ** 2).sum(0) / count + least
    return count / len(values), means, variances


def _expect(
    values: Floats, weights: Floats, means: Floats, variances: Floats
) -> tuple[Floats, float]:
    """Share of each component in each value, and the mean log-likelihood."""
    log = (
        np.log(weights)
        - 0.5 * np.log(2 * np.pi * variances)
        - 0.5 * (values[:, None] - means) ** 2 / variances
    )
    total = np.logaddexp(log[:, 0], log[:, 1])
    return np.exp(log - total[:, None]), float(total.mean())
