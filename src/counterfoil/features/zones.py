"""Connected components of an image, in numpy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Mask = NDArray[np.bool_]


def mask_components(mask: Mask) -> Labels:
    """Components of a mask by its four neighbours; what is outside the mask gets -1."""
    labels = connected(mask[:, 1:] & mask[:, :-1], mask[1:] & mask[:-1])
    used = np.zeros(int(labels.max()) + 1, dtype=bool)
    used[labels[mask]] = True
    numbers = np.cumsum(used) - 1
    return np.where(mask, numbers[labels], -1)


def connected(right: Mask, down: Mask) -> Labels:
    """Components of the grid graph with edges ``right`` [H, W-1] and ``down`` [H-1, W].

    Runs along rows are nodes; unions between rows are done all at once, by hooking the larger
    root to the smaller and halving paths until nothing moves.
    """
    height, width = right.shape[0], down.shape[1]
    starts = np.ones((height, width), dtype=bool)
    starts[:, 1:] = ~right
    runs = np.cumsum(starts.ravel()).reshape(height, width) - 1
    upper, lower = runs[:-1][down], runs[1:][down]
    if len(upper):
        fresh = np.ones(len(upper), dtype=bool)
        fresh[1:] = (upper[1:] != upper[:-1]) | (lower[1:] != lower[:-1])
        upper, lower = upper[fresh], lower[fresh]
    roots = _union(int(runs[-1, -1]) + 1, upper, lower)
    numbers = np.cumsum(roots == np.arange(len(roots))) - 1
    labels: Labels = numbers[roots][runs]
    return labels


def _union(count: int, one: Labels, other: Labels) -> Labels:
    parent = np.arange(count)
    while len(one):
        a, b = parent[one], parent[other]
        apart = a != b
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
        while True:
            shorter = parent[parent]
            if np.array_equal(shorter, parent):
                break
            parent = shorter
    return parent
