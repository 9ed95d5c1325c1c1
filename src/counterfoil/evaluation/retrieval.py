"""Retrieval metrics of a score matrix: R@K, RSUM and ranks, on a whole split or in folds.

Each recall comes with that of a random ranking and, on request, a confidence interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from counterfoil.core.errors import ArgumentError, DataError
from counterfoil.data.duplicates import identical_groups, images_of_groups, with_twin
from counterfoil.evaluation.extended import ExtendedPositives, extended_metrics
from counterfoil.evaluation.ranks import (
    TIE_RULE,
    Counts,
    Indices,
    Ranks,
    ScoreMatrix,
    Values,
    check_image_of,
    check_matrix,
    count_ranks,
    count_ranks_of_groups,
)
from counterfoil.evaluation.report import (
    DirectionReport,
    IdenticalCaptions,
    Protocol,
    Recalls,
    RetrievalReport,
)

CHUNK_DRAWS = 1_000_000

Identical = Literal["both", "negatives", "positives"]
"""How to count identical captions; ``both`` only if there are many, else as negatives."""


FOLDS = 5
"""Folds by default: COCO's 1K protocol on its 5,000 test images."""


def retrieval(
    scores: ScoreMatrix,
    image_of: ArrayLike,
    *,
    split: str = "test",
    protocol: Protocol = "full",
    folds: int | None = None,
    ks: Sequence[int] = (1, 5, 10),
    bootstrap: int = 1000,
    seed: int = 0,
    positives: ExtendedPositives | None = None,
    text_scores: ScoreMatrix | None = None,
    captions: Sequence[str] | None = None,
    identical_captions: Identical = "both",
) -> RetrievalReport:
    """Evaluate ``scores[image, text]``; text ``j`` describes image ``image_of[j]``.

    ``text_scores`` [image, text] replace ``scores`` for text to image if the two differ.

    ``captions`` are the texts themselves; without them, a caption is right for its own image only.
    With them, a caption can count as right for each image that has it word for word
    (``identical_captions="positives"``). By default (``"both"``) the report counts them as
    negatives, like the papers; if they are more than 1 % of all, it has both results.

    ``protocol="folds"`` splits the images, with their captions, into ``folds`` contiguous parts (5
    by default) and reports the mean over them (COCO 1K is five folds of the 5K test images).
    ``bootstrap=0`` omits the intervals.

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
    if folds is not None and protocol == "full":
        raise ArgumentError(
            f"folds={folds} has no effect with protocol='full'; use protocol='folds'"
        )
    folds = FOLDS if folds is None else folds
    ks = _check_options(shape, owners, protocol, folds, ks, bootstrap, positives)
    groups, twins = _find_twins(captions, owners, identical_captions)
    spans = fold_spans(shape[0], folds) if protocol == "folds" else None
    data = _Evaluation(scores, text_scores, owners, spans, ks, bootstrap, seed)
    recalls = data.recalls(groups if twins and twins.counted_as == "positives" else None)
    if twins is not None and identical_captions == "both" and twins.many:
        other = data.recalls(groups)
        twins = twins.model_copy(update={"negatives": recalls, "positives": other})
    return RetrievalReport(
        **dict(recalls),
        split=split,
        protocol=protocol,
        folds=len(spans) if spans else 1,
        images=shape[0],
        captions=shape[1],
        tie_rule=TIE_RULE,
        bootstrap=bootstrap,
        seed=seed if bootstrap else 0,
        extended=extended_metrics(scores, positives, ks=ks) if positives else None,
        identical_captions=twins,
    )


def _find_twins(
    captions: Sequence[str] | None, image_of: Indices, identical: Identical
) -> tuple[Indices | None, IdenticalCaptions | None]:
    """Group ids [n_texts] of identical captions, and how many captions another image has, too."""
    if identical not in ("both", "negatives", "positives"):
        raise ArgumentError(
            f"identical_captions: expected 'positives', 'negatives' or 'both', got {identical!r}"
        )
    if captions is None:
        if identical == "positives":
            raise ArgumentError("identical_captions='positives' needs captions, got none")
        return None, None
    if len(captions) != len(image_of):
        raise DataError(f"captions: {len(captions)} texts for {len(image_of)} columns of scores")
    groups = identical_groups(captions)
    count = int(with_twin(groups, image_of).sum())
    return groups, IdenticalCaptions(
        captions=count,
        share=100.0 * count / max(1, len(groups)),
        counted_as="positives" if identical == "positives" else "negatives",
    )


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """Scores and options of an evaluation, independent of how identical captions count."""

    scores: ScoreMatrix
    text_scores: ScoreMatrix | None
    image_of: Indices
    spans: list[tuple[int, int]] | None
    ks: tuple[int, ...]
    bootstrap: int
    seed: int

    def recalls(self, groups: Indices | None) -> Recalls:
        """Both directions; a caption is right for every image with a caption of its group."""
        parts = self._parts(groups)
        i2t, t2i = (_direction(parts, side, self.ks) for side in ("i2t", "t2i"))
        recalls = Recalls(
            i2t=i2t,
            t2i=t2i,
            rsum=sum(i2t.recalls.values()) + sum(t2i.recalls.values()),
            rsum_chance=sum(i2t.chance.values()) + sum(t2i.chance.values()),
            fold_rsums=tuple(part.rsum for part in parts) if self.spans else (),
        )
        if not self.bootstrap:
            return recalls
        return _with_intervals(recalls, parts, self.ks, self.bootstrap, self.seed)

    def _parts(self, groups: Indices | None) -> list[_Part]:
        if self.spans is not None:
            return [self._fold(span, groups) for span in self.spans]
        ranks = _ranks(self.scores, self.text_scores, self.image_of, groups)
        return [_Part(ranks, self.image_of, self.ks, groups)]

    def _fold(self, span: tuple[int, int], groups: Indices | None) -> _Part:
        first, last = span
        image_of = self.image_of
        texts = np.flatnonzero((image_of >= first) & (image_of < last))
        if not texts.size:
            raise DataError(f"the fold of images {first} to {last - 1} has no captions")
        # Captions are usually ordered by image: a slice is a view, an index array is a copy.
        contiguous = texts[-1] - texts[0] + 1 == len(texts)
        columns = slice(int(texts[0]), int(texts[-1]) + 1) if contiguous else texts
        owners = image_of[texts] - first
        text_scores = self.text_scores
        if text_scores is not None:
            text_scores = text_scores[first:last][:, columns]
        fold_groups = groups[texts] if groups is not None else None
        ranks = _ranks(self.scores[first:last][:, columns], text_scores, owners, fold_groups)
        return _Part(ranks, owners, self.ks, fold_groups)


def fold_spans(n_images: int, folds: int) -> list[tuple[int, int]]:
    """Contiguous folds of images whose sizes differ by at most one.

    >>> fold_spans(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    edges = [n_images * fold // folds for fold in range(folds + 1)]
    return list(pairwise(edges))


@dataclass(frozen=True, eq=False)
class _Part:
    """The ranks of one fold (or of the whole split) and the metrics computed from them."""

    ranks: Ranks
    image_of: Indices
    ks: tuple[int, ...]
    groups: Indices | None = None

    def ranks_of(self, side: str) -> Counts:
        return self.ranks.i2t if side == "i2t" else self.ranks.t2i

    def recall(self, side: str, k: int) -> float:
        return float(100.0 * np.mean(self.ranks_of(side) < k))

    def chance(self, side: str, k: int) -> float:
        targets = self.ranks.n_images if side == "t2i" else self.ranks.n_texts
        return chance_recall(self._right_answers(side), targets, k)

    def _right_answers(self, side: str) -> Indices:
        """Number of right targets per query."""
        if self.groups is None:
            if side == "t2i":
                return np.ones(self.ranks.n_texts, dtype=np.int64)
            return np.bincount(self.image_of, minlength=self.ranks.n_images)
        owned, owners = images_of_groups(self.groups, self.image_of)
        if side == "t2i":
            return np.asarray(np.bincount(owned)[self.groups])
        sizes = np.bincount(self.groups)[owned].astype(np.float64)
        return np.bincount(owners, sizes, minlength=self.ranks.n_images).astype(np.int64)

    @property
    def rsum(self) -> float:
        return sum(self.recall(side, k) for side in ("i2t", "t2i") for k in self.ks)

    def clusters(self) -> tuple[Values, Values]:
        """Sums and sizes per image of (R@K…, rank, 1/rank), image to text then text to image."""
        n_images = self.ranks.n_images
        i2t, t2i = (_measures(self.ranks_of(side), self.ks) for side in ("i2t", "t2i"))
        per_text = [np.bincount(self.image_of, column, minlength=n_images) for column in t2i.T]
        captions = np.bincount(self.image_of, minlength=n_images)[self.ranks.images]
        sums = np.concatenate([i2t, np.stack(per_text, axis=1)[self.ranks.images]], axis=1)
        sizes = np.ones_like(sums)
        sizes[:, i2t.shape[1] :] = captions[:, None]
        return sums, sizes


def _measures(ranks: Counts, ks: tuple[int, ...]) -> Values:
    hits = [100.0 * (ranks < k) for k in ks]
    return np.stack([*hits, ranks + 1.0, 1.0 / (ranks + 1.0)], axis=1)


def _ranks(
    scores: ScoreMatrix, text_scores: ScoreMatrix | None, image_of: Indices, groups: Indices | None
) -> Ranks:
    def count(matrix: ScoreMatrix) -> Ranks:
        if groups is None:
            return count_ranks(matrix, image_of)
        return count_ranks_of_groups(matrix, image_of, groups)

    ranks = count(scores)
    return ranks if text_scores is None else replace(ranks, t2i=count(text_scores).t2i)


def _direction(parts: list[_Part], side: str, ks: tuple[int, ...]) -> DirectionReport:
    ranks = [part.ranks_of(side) for part in parts]
    total = sum(part.ranks.n_images if side == "i2t" else part.ranks.n_texts for part in parts)
    queries = sum(len(each) for each in ranks)
    return DirectionReport(
        queries=queries,
        left_out=total - queries,
        recalls={k: float(np.mean([part.recall(side, k) for part in parts])) for k in ks},
        chance={k: float(np.mean([part.chance(side, k) for part in parts])) for k in ks},
        # floor(median) + 1, as the public implementations print it
        median_rank=float(np.mean([np.floor(np.median(each)) + 1 for each in ranks])),
        mean_rank=float(np.mean([np.mean(each) + 1 for each in ranks])),
        mrr=float(np.mean([np.mean(1.0 / (each + 1.0)) for each in ranks])),
    )


def _with_intervals(
    recalls: Recalls, parts: list[_Part], ks: tuple[int, ...], resamples: int, seed: int
) -> Recalls:
    rng = np.random.default_rng(seed)
    means = np.mean([cluster_bootstrap(*part.clusters(), resamples, rng) for part in parts], axis=0)
    names = [*(f"R@{k}" for k in ks), "mean_rank", "mrr"]
    width = len(names)
    bounds = [interval(column) for column in means.T]
    summed = [*range(len(ks)), *range(width, width + len(ks))]
    i2t = dict(zip(names, bounds[:width], strict=True))
    t2i = dict(zip(names, bounds[width:], strict=True))
    return recalls.model_copy(
        update={
            "i2t": recalls.i2t.model_copy(update={"intervals": i2t}),
            "t2i": recalls.t2i.model_copy(update={"intervals": t2i}),
            "rsum_interval": interval(means[:, summed].sum(axis=1)),
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
        raise ArgumentError(f"protocol: expected 'full' or 'folds', got {protocol!r}")
    for name, number in (("folds", folds), ("bootstrap", bootstrap)):
        if not _is_whole(number):
            raise ArgumentError(f"{name}: expected a whole number, got {number!r}")
    if protocol == "folds" and not 1 <= folds <= shape[0]:
        raise ArgumentError(f"folds: expected 1 to {shape[0]} (the number of images), got {folds}")
    if protocol == "folds" and positives is not None:
        raise ArgumentError("extended positives cross folds: use protocol='full' with them")
    listed = tuple(ks) if isinstance(ks, Iterable) else ()
    if not listed or not all(_is_whole(k) and k >= 1 for k in listed):
        raise ArgumentError(f"ks: expected whole numbers of at least 1, such as (1, 5), got {ks!r}")
    if bootstrap < 0:
        raise ArgumentError(f"bootstrap: expected 0 or more resamples, got {bootstrap}")
    return tuple(sorted({int(k) for k in listed}))


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def chance_recall(counts: ArrayLike, n_targets: int, k: int) -> float:
    """Expected hit rate at ``k``, in percent, for queries with the given numbers of positives.

    A query with c positives among n misses with probability C(n - c, k) / C(n, k). Queries without
    positives are ignored.

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
    remaining = np.maximum(n_targets - positives[:, None] - draws, 0.0)
    miss = np.prod(remaining / (n_targets - draws), axis=1)
    return float(100.0 * np.mean(1.0 - miss))


def cluster_bootstrap(
    sums: Values, sizes: Values, resamples: int, rng: np.random.Generator
) -> Values:
    """Resampled means ``[resamples, n_metrics]`` of metrics given per cluster.

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
