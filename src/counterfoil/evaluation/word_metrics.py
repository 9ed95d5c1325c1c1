"""How well scores find the few positives among many: ROC-AUC and average precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.errors import DataError

Values = NDArray[np.float64]


class Ranking:
    """Items in order of their score, equal scores as one step, for any weights of the items.

    Sorting is done once, so that resampling costs a cumulative sum a time. ``weights`` are
    [..., n], 1 where absent; the result has their leading shape. Where there is nothing to find, or
    nothing to tell it from, the answer is NaN.
    """

    def __init__(self, scores: ArrayLike, labels: ArrayLike) -> None:
        values = np.asarray(scores, dtype=np.float64)
        marked = np.asarray(labels, dtype=bool)
        if values.ndim != 1 or values.shape != marked.shape:
            raise DataError(f"{values.shape} scores but {marked.shape} labels")
        if not np.isfinite(values).all():
            raise DataError("a score is not a finite number")
        self.order = np.argsort(-values, kind="stable")
        ranked = values[self.order]
        self.labels = marked[self.order]
        self.ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)[: len(ranked)]

    def auc(self, weights: ArrayLike | None = None) -> Values:
        """Share of (positive, negative) pairs in the right order, ties counted half."""
        found, wrong = self._counts(weights)
        before = np.diff(wrong, axis=-1, prepend=0.0)
        outranked = wrong[..., -1:] - wrong + before / 2
        pairs = found[..., -1] * wrong[..., -1]
        steps = np.diff(found, axis=-1, prepend=0.0)
        return _share((steps * outranked).sum(-1), pairs)

    def average_precision(self, weights: ArrayLike | None = None) -> Values:
        """Mean over the positives of the precision down to each one's score, its ties included."""
        found, wrong = self._counts(weights)
        precision = np.nan_to_num(_share(found, found + wrong))
        steps = np.diff(found, axis=-1, prepend=0.0)
        return _share((steps * precision).sum(-1), found[..., -1])

    def _counts(self, weights: ArrayLike | None) -> tuple[Values, Values]:
        """Positives and negatives down to each distinct score, [..., steps]."""
        if not len(self.order):
            return np.zeros(1), np.zeros(1)
        each = np.ones(len(self.order)) if weights is None else np.asarray(weights, np.float64)
        each = each if weights is None else each[..., self.order]
        found = np.cumsum(each * self.labels, axis=-1)[..., self.ends]
        wrong = np.cumsum(each * ~self.labels, axis=-1)[..., self.ends]
        return found, wrong


def roc_auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve.

    >>> roc_auc([3.0, 2.0, 2.0, 1.0], [True, True, False, False])
    0.875
    """
    return float(Ranking(scores, labels).auc())


def average_precision(scores: ArrayLike, labels: ArrayLike) -> float:
    """Average precision, without interpolation.

    >>> average_precision([3.0, 2.0, 1.0], [True, False, True])
    0.8333333333333333
    """
    return float(Ranking(scores, labels).average_precision())


def _share(part: Values, whole: Values) -> Values:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(part / whole, dtype=np.float64)
