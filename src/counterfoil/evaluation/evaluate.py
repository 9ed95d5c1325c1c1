"""Evaluate a model or an ensemble on a split: retrieval metrics and example searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import ArgumentError, ConfigError, DataError
from counterfoil.core.progress import Progress, as_progress
from counterfoil.core.registry import short_repr
from counterfoil.data.pairs import Pairs, Split
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.ranks import (
    Floats,
    ScoreMatrix,
    as_floats,
    check_matrix,
    read_rows,
    row_chunks,
    top_k,
)
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.evaluation.retrieval import Identical, retrieval

if TYPE_CHECKING:
    from counterfoil.models.model import Model
    from counterfoil.scoring.encode import SplitScores

CHUNK_CELLS = 2_000_000


def _require_split(given: object) -> None:
    if not isinstance(given, Split):
        names = f", such as pairs.{next(iter(given.splits))}" if isinstance(given, Pairs) else ""
        raise ArgumentError(f"evaluate: expected one split{names}, got {type(given).__name__}")


def evaluate(
    model: Model | Sequence[Model],
    split: Split,
    *,
    folds: int = 0,
    batch_size: int = 256,
    bootstrap: int = 1000,
    positives: ExtendedPositives | None = None,
    standardize: bool = False,
    identical_captions: Identical = "both",
    progress: Progress | bool | None = None,
) -> RetrievalReport:
    """Retrieval metrics in both directions; several models are an ensemble with averaged scores.

    ``folds=5`` is COCO's 1K protocol on the 5K test images, ``folds=0`` the whole split.
    ``standardize`` divides each model's scores by their standard deviation before averaging.
    ``identical_captions`` says how captions of several images count (see `retrieval`).
    """
    from counterfoil.models.model import Model  # both import torch
    from counterfoil.scoring.encode import score_split

    _require_split(split)
    models = list(model) if isinstance(model, Sequence) else [model]
    if not models:
        raise ConfigError("nothing to evaluate: no model given")
    if not all(isinstance(one, Model) for one in models):
        raise ArgumentError(
            f"evaluate: expected a model or several, as load returns them, got {short_repr(model)}"
        )
    bars = as_progress(progress)
    results = [score_split(one, split, batch_size, bars) for one in models]
    return report_scores(
        results,
        split.name,
        folds=folds,
        bootstrap=bootstrap,
        positives=positives,
        standardize=standardize,
        captions=results[0].captions(split),
        identical_captions=identical_captions,
    )


def report_scores(
    results: Sequence[SplitScores],
    split: str,
    *,
    folds: int = 0,
    bootstrap: int = 1000,
    positives: ExtendedPositives | None = None,
    standardize: bool = False,
    captions: Sequence[str] | None = None,
    identical_captions: Identical = "both",
) -> RetrievalReport:
    """The report of one score matrix, or of the average of several over the same pairs.

    ``captions`` are the texts of the columns; without them no captions count as identical.
    """
    matrices = [one.scores for one in results]
    scores = matrices[0] if len(results) == 1 else average(matrices, standardize=standardize)
    return retrieval(
        scores,
        results[0].image_of,
        split=split,
        protocol="folds" if folds else "full",
        folds=folds or None,
        bootstrap=bootstrap,
        positives=positives,
        captions=captions,
        identical_captions=identical_captions,
    )


def flat_metrics(report: RetrievalReport) -> dict[str, float]:
    """The metrics of a report under short names for logs: ``i2t_r1`` … ``rsum``."""
    numbers = {"rsum": report.rsum}
    for name, side in (("i2t", report.i2t), ("t2i", report.t2i)):
        numbers |= {f"{name}_r{k}": recall for k, recall in side.recalls.items()}
        numbers |= {f"{name}_medr": side.median_rank, f"{name}_meanr": side.mean_rank}
        numbers |= {f"{name}_mrr": side.mrr}
    return numbers


def average(
    score_matrices: Sequence[ScoreMatrix],
    weights: Sequence[float] | None = None,
    *,
    standardize: bool = False,
) -> Floats:
    """The (weighted) mean of score matrices of one shape, in the widest of their types.

    ``standardize`` first divides each matrix by its standard deviation, so that a model with a
    wider spread of scores has no larger weight.

    >>> average([np.zeros((1, 2)), np.ones((1, 2))], weights=[3, 1]).tolist()
    [[0.25, 0.25]]
    >>> average([np.array([[0, 1]]), np.array([[20, 0]])], standardize=True).tolist()
    [[1.0, 1.0]]
    """
    if not score_matrices:
        raise DataError("average: no score matrices given")
    shape = check_matrix(score_matrices[0])
    for position, scores in enumerate(score_matrices):
        if tuple(scores.shape) != shape:
            raise DataError(
                f"average: matrix {position} has shape {tuple(scores.shape)}, matrix 0 has {shape}"
            )
    shares = _shares(weights, len(score_matrices))
    if standardize:
        widths = [_deviation(scores, shape) for scores in score_matrices]
        shares = [share / width for share, width in zip(shares, widths, strict=True)]
    dtype = np.result_type(*(as_floats(scores[:0]).dtype for scores in score_matrices))
    mean = np.empty(shape, dtype=dtype)
    for first, last in row_chunks(0, shape[0], shape[1], CHUNK_CELLS):
        total = np.zeros((last - first, shape[1]))
        for scores, share in zip(score_matrices, shares, strict=True):
            total += share * read_rows(scores, first, last)
        mean[first:last] = total
    return mean


def _deviation(scores: ScoreMatrix, shape: tuple[int, int]) -> float:
    """The standard deviation of all scores; 1 if all are equal up to float64 rounding."""
    chunks = list(row_chunks(0, shape[0], shape[1], CHUNK_CELLS))
    cells = shape[0] * shape[1]
    if not cells:
        return 1.0
    mean = sum(float(read_rows(scores, *rows).sum(dtype=np.float64)) for rows in chunks) / cells
    squares = (read_rows(scores, *rows).astype(np.float64) - mean for rows in chunks)
    width = float(np.sqrt(sum(float(np.square(part).sum()) for part in squares) / cells))
    return width if np.isfinite(width) and width > 1e-12 * abs(mean) else 1.0


@dataclass(frozen=True)
class Hit:
    """One result: index of the image or caption in the split, its score, whether it is right."""

    index: int
    score: float
    right: bool


@dataclass(frozen=True)
class Search:
    """A query (index of a caption or image in the split), its top hits, the rank of the answer."""

    query: int
    hits: list[Hit]
    rank: int


@dataclass(frozen=True)
class Gallery:
    """Example searches with captions for images, and with images for captions."""

    text_to_image: list[Search]
    image_to_text: list[Search]


def example_searches(result: SplitScores, count: int = 3, hits: int = 5, seed: int = 0) -> Gallery:
    """``count`` searches in each direction with queries drawn at random."""
    rng = np.random.default_rng(seed)
    scores, image_of = as_floats(result.scores), result.image_of
    captions, images = (
        rng.choice(size, size=min(count, size), replace=False).tolist()
        for size in scores.shape[::-1]
    )
    rows = np.arange(len(scores))
    return Gallery(
        [
            _search(result.texts[t], scores[:, t], rows == image_of[t], result.images, hits)
            for t in captions
        ],
        [_search(result.images[i], scores[i], image_of == i, result.texts, hits) for i in images],
    )


def _search(
    query: int, scores: Floats, right: NDArray[np.bool_], indices: list[int], hits: int
) -> Search:
    best = scores[right].max(initial=-np.inf)
    rank = 1 + int(np.count_nonzero(scores[~right] >= best))
    top = top_k(scores[None], hits)[0].tolist()
    return Search(query, [Hit(indices[i], float(scores[i]), bool(right[i])) for i in top], rank)


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0 / count] * count
    if len(weights) != count:
        raise DataError(f"average: {count} matrices but {len(weights)} weights")
    values = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise DataError(
            f"average: weights must be non-negative with a positive sum, got {list(weights)}"
        )
    shares: list[float] = (values / values.sum()).tolist()
    return shares
