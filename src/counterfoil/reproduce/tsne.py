"""t-SNE of a few hundred vectors (van der Maaten & Hinton 2008), exact and deterministic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEPS, EXAGGERATED = 600, 120
RATE, EXAGGERATION = 20.0, 4.0
TINY = 1e-12


def embed(vectors: NDArray[np.floating], perplexity: float = 30.0) -> Array:
    """Places [n, 2] of vectors [n, D]; vectors that are near each other stay so.

    It starts from the two principal components, so the same vectors have the same places.
    """
    points = np.asarray(vectors, dtype=np.float64)
    count = len(points)
    if count < 3:
        return np.stack([np.arange(count, dtype=np.float64), np.zeros(count)], axis=1)
    joint = _joint(_distances(points), min(perplexity, (count - 1) / 3))
    places = _principal(points)
    moved, gains = np.zeros_like(places), np.ones_like(places)
    for step in range(STEPS):
        early = step < EXAGGERATED
        gradient = _gradient(places, joint * (EXAGGERATION if early else 1.0))
        # a coordinate that keeps its direction may go faster
        gains = np.where(np.sign(gradient) != np.sign(moved), gains + 0.2, gains * 0.8).clip(0.01)
        moved = (0.5 if early else 0.8) * moved - RATE * gains * gradient
        places = places + moved
        places = places - places.mean(0)
    return places


def _distances(points: Array) -> Array:
    """Squared Euclidean distances [n, n]."""
    norms = (points**2).sum(1)
    return np.maximum(norms[:, None] + norms[None] - 2 * points @ points.T, 0.0)


def _joint(distances: Array, perplexity: float) -> Array:
    """Symmetric neighbour probabilities [n, n]; each row's bandwidth gives it the perplexity."""
    count, target = len(distances), np.log(perplexity)
    low, high = np.zeros(count), np.full(count, np.inf)
    # in units of the mean distance, so that the search begins near its end
    beta = np.full(count, 1.0 / max(float(distances.mean()), TINY))
    for _ in range(60):
        rows, entropy = _conditional(distances, beta)
        wide = entropy > target
        low, high = np.where(wide, beta, low), np.where(wide, high, beta)
        beta = np.where(np.isinf(high), beta * 2, (low + high) / 2)
    rows, _ = _conditional(distances, beta)
    return np.maximum((rows + rows.T) / (2 * count), TINY)


def _conditional(distances: Array, beta: Array) -> tuple[Array, Array]:
    """Neighbour probabilities of each row at its precision, and their entropies."""
    off = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    weights = np.exp(-beta[:, None] * (off - off.min(1, keepdims=True)))
    rows = weights / weights.sum(1, keepdims=True)
    return rows, -(rows * np.log(np.maximum(rows, TINY))).sum(1)


def _principal(points: Array) -> Array:
    """The first two principal components, small, with signs that do not depend on the library."""
    centred = points - points.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    if len(directions) < 2:
        directions = np.concatenate([directions, np.zeros_like(directions)])
    largest = np.abs(directions).argmax(1)
    signs = np.sign(directions[np.arange(2), largest])
    places: Array = centred @ (directions * np.where(signs == 0, 1.0, signs)[:, None]).T
    return places * (1e-2 / max(float(places.std()), TINY))


def _gradient(places: Array, joint: Array) -> Array:
    """Of the divergence between the joint probabilities and those of the places."""
    near = 1 / (1 + _distances(places))
    np.fill_diagonal(near, 0.0)
    weights = (joint - near / near.sum()) * near
    result: Array = 4 * (weights.sum(1)[:, None] * places - weights @ places)
    return result
