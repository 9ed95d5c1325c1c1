"""Retrieval both ways: R@K, RSUM and ranks of a score matrix, whole or in folds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.errors import ConfigError, DataError
from counterfoil.evaluation.bootstrap import cluster_bootstrap, interval
from counterfoil.evaluation.chance import chance_recall
from counterfoil.evaluation.extended import ExtendedPositives, extended_metrics
from counterfoil.evaluation.matrices import Indices, ScoreMatrix, check_image_of, check_matrix
from counterfoil.evaluation.ranks import TIE_RULE, Counts, Ranks, count_ranks
from counterfoil.evaluation.report import DirectionReport, Protocol, RetrievalReport

Values = NDArray[np.float64]


def retrieval(
    scores: ScoreMatrix,
    image_of: ArrayLike,
    *,
    split: str = "test",
    protocol: Protocol = "full",
    folds: int = 5,
    ks: Sequence[int] = (1, 5, 10),
    bootstrap: int = 1000,
    seed: int = 0,
    positives: ExtendedPositives | None = None,
    text_scores: ScoreMatrix | None = None,
) -> RetrievalReport:
    """Evaluate ``scores[image, text]``, where text ``j`` describes image ``image_of[j]``.

    ``text_scores`` [image, text] are those for text to image, where they are others.

    ``protocol="folds"`` cuts the images, with their captions, into ``folds`` contiguous parts and
    reports the mean over them (COCO 1K is five folds of the 5K test images). ``bootstrap=0`` leaves
    the intervals out.

    >>> report = retrieval(np.eye(20), np.arange(20), bootstrap=0)
    >>> report.i2t.recalls, report.rsum
    ({1: 100.0, 5: 100.0, 10: 100.0}, 600.0)
    """
    shape = check_matrix(scores)
    owners = check_image_of(image_of, shape)
    if text_scores is not None and check_matrix(text_scores) != shape:
        raise DataError(
            f"text_scores: shape {tuple(text_scores.shape)}, but scores have shape {shape}"
        )
    ks = _check_options(shape, owners, protocol, folds, ks, bootstrap, positives)
    if protocol == "full":
        parts = [_Part(_ranks(scores, text_scores, owners), owners, ks)]
    else:
        spans = fold_spans(shape[0], folds)
        parts = [_fold(scores, text_scores, owners, span, ks) for span in spans]
    i2t, t2i = (_direction(parts, side, ks) for side in ("i2t", "t2i"))
    report = RetrievalReport(
        split=split,
        protocol=protocol,
        folds=len(parts),
        images=shape[0],
        captions=shape[1],
        tie_rule=TIE_RULE,
        i2t=i2t,
        t2i=t2i,
        rsum=sum(i2t.recalls.values()) + sum(t2i.recalls.values()),
        rsum_chance=sum(i2t.chance.values()) + sum(t2i.chance.values()),
        fold_rsums=tuple(part.rsum for part in parts) if protocol == "folds" else (),
        extended=extended_metrics(scores, positives, ks=ks) if positives else None,
    )
    return _with_intervals(report, parts, ks, bootstrap, seed) if bootstrap else report


def fold_spans(n_images: int, folds: int) -> list[tuple[int, int]]:
    """Contiguous folds of images, as equal as they can be.

    >>> fold_spans(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    edges = [n_images * fold // folds for fold in range(folds + 1)]
    return list(pairwise(edges))


@dataclass(frozen=True, eq=False)
class _Part:
    """The ranks of one fold (or of everything) and what they amount to."""

    ranks: Ranks
    image_of: Indices
    ks: tuple[int, ...]

    def of(self, side: str) -> Counts:
        return self.ranks.i2t if side == "i2t" else self.ranks.t2i

    def recall(self, side: str, k: int) -> float:
        return float(100.0 * np.mean(self.of(side) < k))

    def chance(self, side: str, k: int) -> float:
        if side == "t2i":
            return chance_recall(np.ones(self.ranks.n_texts), self.ranks.n_images, k)
        captions = np.bincount(self.image_of, minlength=self.ranks.n_images)
        return chance_recall(captions, self.ranks.n_texts, k)

    @property
    def rsum(self) -> float:
        return sum(self.recall(side, k) for side in ("i2t", "t2i") for k in self.ks)

    def clusters(self) -> tuple[Values, Values]:
        """Sums and sizes per image of (R@K…, rank, 1/rank), image to text then text to image."""
        n_images = self.ranks.n_images
        i2t, t2i = (_measures(self.of(side), self.ks) for side in ("i2t", "t2i"))
        per_text = [np.bincount(self.image_of, column, minlength=n_images) for column in t2i.T]
        captions = np.bincount(self.image_of, minlength=n_images)[self.ranks.images]
        sums = np.concatenate([i2t, np.stack(per_text, axis=1)[self.ranks.images]], axis=1)
        sizes = np.ones_like(sums)
        sizes[:, i2t.shape[1] :] = captions[:, None]
        return sums, sizes


def _measures(ranks: Counts, ks: tuple[int, ...]) -> Values:
    hits = [100.0 * (ranks < k) for k in ks]
    return np.stack([*hits, ranks + 1.0, 1.0 / (ranks + 1.0)], axis=1)


def _ranks(scores: ScoreMatrix, text_scores: ScoreMatrix | None, image_of: Indices) -> Ranks:
    found = count_ranks(scores, image_of)
    if text_scores is None:
        return found
    return replace(found, t2i=count_ranks(text_scores, image_of).t2i)


def _fold(
    scores: ScoreMatrix,
    text_scores: ScoreMatrix | None,
    image_of: Indices,
    span: tuple[int, int],
    ks: tuple[int, ...],
) -> _Part:
    first, last = span
    texts = np.flatnonzero((image_of >= first) & (image_of < last))
    if not texts.size:
        raise DataError(f"the fold of images {first} to {last - 1} has no captions")
    # Captions lie image by image as a rule: a slice is a view, an index array is a copy.
    contiguous = texts[-1] - texts[0] + 1 == len(texts)
    columns = slice(int(texts[0]), int(texts[-1]) + 1) if contiguous else texts
    owners = image_of[texts] - first
    other = text_scores[first:last][:, columns] if text_scores is not None else None
    return _Part(_ranks(scores[first:last][:, columns], other, owners), owners, ks)


def _direction(parts: list[_Part], side: str, ks: tuple[int, ...]) -> DirectionReport:
    ranks = [part.of(side) for part in parts]
    asked = sum(part.ranks.n_images if side == "i2t" else part.ranks.n_texts for part in parts)
    queries = sum(len(found) for found in ranks)
    return DirectionReport(
        queries=queries,
        left_out=asked - queries,
        recalls={k: float(np.mean([part.recall(side, k) for part in parts])) for k in ks},
        chance={k: float(np.mean([part.chance(side, k) for part in parts])) for k in ks},
        # floor(median) + 1, as the public implementations print it
        median_rank=float(np.mean([np.floor(np.median(found)) + 1 for found in ranks])),
        mean_rank=float(np.mean([np.mean(found) + 1 for found in ranks])),
        mrr=float(np.mean([np.mean(1.0 / (found + 1.0)) for found in ranks])),
    )


def _with_intervals(
    report: RetrievalReport, parts: list[_Part], ks: tuple[int, ...], resamples: int, seed: int
) -> RetrievalReport:
    rng = np.random.default_rng(seed)
    means = np.mean([cluster_bootstrap(*part.clusters(), resamples, rng) for part in parts], axis=0)
    names = [*(f"R@{k}" for k in ks), "mean_rank", "mrr"]
    width = len(names)
    bounds = [interval(column) for column in means.T]
    recalls = [*range(len(ks)), *range(width, width + len(ks))]
    i2t = dict(zip(names, bounds[:width], strict=True))
    t2i = dict(zip(names, bounds[width:], strict=True))
    return report.model_copy(
        update={
            "i2t": report.i2t.model_copy(update={"intervals": i2t}),
            "t2i": report.t2i.model_copy(update={"intervals": t2i}),
            "rsum_interval": interval(means[:, recalls].sum(axis=1)),
            "bootstrap": resamples,
            "seed": seed,
        }
    )


def _check_options(
    shape: tuple[int, int],
    image_of: Indices,
    protocol: str,
    folds: int,
    ks: Sequence[int],
    bootstrap: int,
    positives: ExtendedPositives | None,
) -> tuple[int, ...]:
    if not image_of.size:
        raise DataError(f"nothing to evaluate: {shape[0]} images and {shape[1]} captions")
    if protocol not in ("full", "folds"):
        raise ConfigError(f"protocol: expected 'full' or 'folds', got {protocol!r}")
    if protocol == "folds" and not 1 <= folds <= shape[0]:
        raise ConfigError(f"folds: expected 1 to {shape[0]} (the number of images), got {folds}")
    if protocol == "folds" and positives is not None:
        raise ConfigError("extended positives cross folds: use protocol='full' with them")
    if not ks or min(ks) < 1:
        raise ConfigError(f"ks: expected at least one K, each at least 1, got {tuple(ks)}")
    if bootstrap < 0:
        raise ConfigError(f"bootstrap: expected 0 or more resamples, got {bootstrap}")
    return tuple(sorted({int(k) for k in ks}))
