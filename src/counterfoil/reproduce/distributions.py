"""Distributions of matched and mismatched similarities (NAAF, figure 3), and t-SNE of vectors.

A NAAF run logs a histogram of its samples per epoch to `metrics.jsonl`. All numbers here are
computed from the bins, each represented by its midpoint, so that they can be recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.reproduce.plan import Plan
from counterfoil.reproduce.results import Distribution, Reproduction
from counterfoil.reproduce.spec import Histograms
from counterfoil.reproduce.spread import Measure
from counterfoil.training.logs import read_metrics

Record = dict[str, Any]

EPOCH_NAMES = {"first": "first epoch", "unadjusted": "last epoch with α", "last": "last epoch"}

HEADS = (
    *("epoch", "boundary t"),
    *("matched: mean", "std", "skewness", "excess kurtosis", "below t, %"),
    *("mismatched: mean", "std", "skewness", "excess kurtosis", "above t, %"),
    *("error at t, %", "of normals, %"),
)
NUMBERS = (
    *("matched_mean", "matched_std", "matched_skewness", "matched_kurtosis", "matched_below"),
    *("mismatched_mean", "mismatched_std", "mismatched_skewness", "mismatched_kurtosis"),
    *("mismatched_above", "error", "normal_error"),
)

Array = NDArray[np.float64]
STEPS, EXAGGERATED = 600, 120
RATE, EXAGGERATION = 20.0, 4.0
MIN_DENSITY = 1e-12


def read_distributions(plan: Plan, artifact: Histograms) -> list[Distribution]:
    """Distributions of every row with a finished seed, at the epochs of the figure."""
    distributions = []
    for row in artifact.rows:
        runs = [run for run in plan.runs[row.members[0]] if run.state == "finished"]
        by_seed = [sampled_epochs(read_metrics(run.folder / "metrics.jsonl")) for run in runs]
        used_epochs: set[int] = set()
        for name in reversed(artifact.epochs):  # if two names mean one epoch, use the later name
            chosen = [epoch for epochs in by_seed if (epoch := choose_epoch(name, epochs))]
            if chosen and chosen[0]["epoch"] not in used_epochs:
                used_epochs.add(chosen[0]["epoch"])
                distributions.append(_distribution(row.name, EPOCH_NAMES[name], chosen))
    order = {
        (row.name, when): k for row in artifact.rows for k, when in enumerate(EPOCH_NAMES.values())
    }
    names = [row.name for row in artifact.rows]
    return sorted(distributions, key=lambda one: (names.index(one.row), order[(one.row, one.when)]))


def sampled_epochs(records: Sequence[Record]) -> list[Record]:
    """Histograms by epoch, counted from 1; of both directions, the text-to-image one."""
    epochs = []
    for record in records:
        sides = record.get("mismatch_histogram") or {}
        if record["kind"] == "epoch" and sides:
            side = sides.get("t2i") or next(iter(sides.values()))
            epochs.append({"epoch": record["epoch"], **side})
    return epochs


def choose_epoch(name: str, epochs: Sequence[Record]) -> Record | None:
    """The first epoch, the last, or the last one that used α; None if there is none."""
    if name == "unadjusted":
        epochs = [epoch for epoch in epochs if epoch["alpha"] is not None]
    if not epochs:
        return None
    return epochs[0] if name == "first" else epochs[-1]


def _distribution(row: str, when: str, seeds: Sequence[Record]) -> Distribution:
    each = [describe_samples(record) for record in seeds]
    keys = dict.fromkeys(key for numbers in each for key in numbers)
    numbers = {key: Measure.over([one[key] for one in each if key in one]) for key in keys}
    return Distribution(row=row, when=when, **seeds[0], numbers=numbers)


def describe_samples(record: Record) -> dict[str, float]:
    """Shape of both distributions, and their errors at the boundary t in percent.

    ``error`` is the mean of the shares of matched samples below t and of mismatched ones above it.
    ``normal_error`` is the same for normal distributions of equal means and deviations.
    """
    t, ends = record["boundary"], (record["low"], record["high"])
    numbers = {"boundary": t}
    normal: list[float] = []
    for kind, below in (("matched", True), ("mismatched", False)):
        counts = record[kind]
        if not any(counts):
            continue
        shape = shape_of(*ends, counts)
        numbers |= {f"{kind}_{name}": value for name, value in shape.items()}
        under = share_below(t, *ends, counts)
        numbers[f"{kind}_{'below' if below else 'above'}"] = 100 * (under if below else 1 - under)
        under = _normal_share_below(t, shape["mean"], shape["std"])
        normal.append(100 * (under if below else 1 - under))
    if len(normal) == 2:
        numbers["error"] = (numbers["matched_below"] + numbers["mismatched_above"]) / 2
        numbers["normal_error"] = sum(normal) / 2
    return numbers


def shape_of(low: float, high: float, counts: Sequence[int]) -> dict[str, float]:
    """Mean, deviation, skewness and excess kurtosis of a histogram.

    >>> shape_of(0.0, 4.0, [1, 1, 1, 1])["mean"], shape_of(0.0, 4.0, [1, 1, 1, 1])["skewness"]
    (2.0, 0.0)
    """
    width = (high - low) / len(counts)
    middles = low + width * (np.arange(len(counts)) + 0.5)
    number = sum(counts)
    mean = float(np.dot(counts, middles) / number)
    second, third, fourth = (
        float(np.dot(counts, (middles - mean) ** power) / number) for power in (2, 3, 4)
    )
    flat = second < 1e-12  # all in one bin
    return {
        "mean": mean,
        "std": math.sqrt(second),
        "skewness": 0.0 if flat else third / second**1.5,
        "kurtosis": 0.0 if flat else fourth / second**2 - 3,
    }


def share_below(t: float, low: float, high: float, counts: Sequence[int]) -> float:
    """Share of a histogram below t; the bin that contains t counts proportionally.

    >>> share_below(1.5, 0.0, 4.0, [1, 1, 1, 1])
    0.375
    """
    position = (t - low) / (high - low) * len(counts)
    whole = min(len(counts), max(0, math.floor(position)))
    below = float(sum(counts[:whole]))
    if 0 <= position < len(counts):
        below += (position - whole) * counts[whole]
    return below / sum(counts)


def _normal_share_below(t: float, mean: float, std: float) -> float:
    return 0.5 * math.erfc((mean - t) / (max(std, 1e-6) * math.sqrt(2)))


def distribution_rows(result: Reproduction) -> list[tuple[str, ...]]:
    """A header, and one line of numbers per row and epoch."""
    table: list[tuple[str, ...]] = [(", ".join(result.columns), *HEADS)]
    for one in result.distributions:
        cells = [one.numbers["boundary"].text(3)]
        for name in NUMBERS:
            number = one.numbers.get(name)
            percent = name.endswith(("below", "above", "error"))
            cells.append("" if number is None else number.text(1 if percent else 3))
        table.append((one.row, f"{one.epoch} ({one.when})", *cells))
    return table


def distribution_notes(result: Reproduction) -> list[str]:
    """An explanation of the table of distributions, and the rows without one."""
    if result.kind != "histograms":
        return []
    drawn = {one.row for one in result.distributions}
    notes = [
        f"{row.name}: no finished run sampled any similarity."
        for row in result.rows
        if row.name not in drawn and not row.quoted
    ]
    if drawn:
        notes.insert(
            0,
            "Error at t: the mean of two shares, matched samples below the boundary and mismatched "
            "ones above it. Of normals: the same for the fitted normal distributions. A normal "
            "distribution has skewness 0 and excess kurtosis 0. The picture shows the first seed.",
        )
    return notes


# t-SNE of a few hundred vectors (van der Maaten & Hinton 2008), exact and deterministic.


def embed(vectors: NDArray[np.floating], perplexity: float = 30.0) -> Array:
    """Positions [n, 2] of vectors [n, D] by t-SNE.

    It starts from the two principal components, so the result is deterministic.
    """
    points = np.asarray(vectors, dtype=np.float64)
    count = len(points)
    if count < 3:
        return np.stack([np.arange(count, dtype=np.float64), np.zeros(count)], axis=1)
    joint = _joint(_distances(points), min(perplexity, (count - 1) / 3))
    positions = _principal(points)
    moved, gains = np.zeros_like(positions), np.ones_like(positions)
    for step in range(STEPS):
        early = step < EXAGGERATED
        gradient = _gradient(positions, joint * (EXAGGERATION if early else 1.0))
        # a coordinate that keeps its direction gets a larger step
        gains = np.where(np.sign(gradient) != np.sign(moved), gains + 0.2, gains * 0.8).clip(0.01)
        moved = (0.5 if early else 0.8) * moved - RATE * gains * gradient
        positions = positions + moved
        positions = positions - positions.mean(0)
    return positions


def _distances(points: Array) -> Array:
    """Squared Euclidean distances [n, n]."""
    norms = (points**2).sum(1)
    return np.maximum(norms[:, None] + norms[None] - 2 * points @ points.T, 0.0)


def _joint(distances: Array, perplexity: float) -> Array:
    """Symmetric neighbor probabilities [n, n]; bandwidths are fitted to the perplexity."""
    count, target = len(distances), np.log(perplexity)
    low, high = np.zeros(count), np.full(count, np.inf)
    # start the bisection at the scale of the mean distance
    beta = np.full(count, 1.0 / max(float(distances.mean()), MIN_DENSITY))
    for _ in range(60):
        rows, entropy = _conditional(distances, beta)
        wide = entropy > target
        low, high = np.where(wide, beta, low), np.where(wide, high, beta)
        beta = np.where(np.isinf(high), beta * 2, (low + high) / 2)
    rows, _ = _conditional(distances, beta)
    return np.maximum((rows + rows.T) / (2 * count), MIN_DENSITY)


def _conditional(distances: Array, beta: Array) -> tuple[Array, Array]:
    """Neighbor probabilities of each row at its precision, and their entropies."""
    off = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    weights = np.exp(-beta[:, None] * (off - off.min(1, keepdims=True)))
    rows = weights / weights.sum(1, keepdims=True)
    return rows, -(rows * np.log(np.maximum(rows, MIN_DENSITY))).sum(1)


def _principal(points: Array) -> Array:
    """The first two principal components, scaled down, with deterministic signs."""
    centered = points - points.mean(0)
    directions = np.linalg.svd(centered, full_matrices=False)[2][:2]
    if len(directions) < 2:
        directions = np.concatenate([directions, np.zeros_like(directions)])
    largest = np.abs(directions).argmax(1)
    signs = np.sign(directions[np.arange(2), largest])
    positions: Array = centered @ (directions * np.where(signs == 0, 1.0, signs)[:, None]).T
    return positions * (1e-2 / max(float(positions.std()), MIN_DENSITY))


def _gradient(positions: Array, joint: Array) -> Array:
    """Gradient of the KL divergence between joint probabilities and those of the positions."""
    near = 1 / (1 + _distances(positions))
    np.fill_diagonal(near, 0.0)
    weights = (joint - near / near.sum()) * near
    result: Array = 4 * (weights.sum(1)[:, None] * positions - weights @ positions)
    return result
