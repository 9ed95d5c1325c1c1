"""Evaluate how well word effects find wrong words, in drawn scenes and in rule-made foils."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.data.pairs import Split
from counterfoil.evaluation.foils.truth import has_truth
from counterfoil.evaluation.ranks import Values
from counterfoil.evaluation.report import KindReport, Measured, WordReport
from counterfoil.evaluation.retrieval import interval
from counterfoil.evaluation.words.cases import KINDS, Foils, make_foils, rule_cases
from counterfoil.evaluation.words.effects import (
    WordScores,
    average_words,
    measure_words,
    sign_accuracy,
)
from counterfoil.foils import DEFAULT_KINDS
from counterfoil.models.match import METHODS, UNSIGNED, Method
from counterfoil.models.model import Model

CHUNK_CELLS = 4_000_000
CHOICE_CAPTIONS = 200
"""Captions with exchanged words that choose between the methods of word effects."""


def evaluate_words(
    model: Model | Sequence[Model],
    split: Split,
    *,
    foils: int = 1,
    max_captions: int | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    method: Method | None = None,
    progress: Progress | None = None,
) -> WordReport:
    """Make captions of a split false, and measure how well word effects find the wrong words.

    Several models are an ensemble: their scores and effects are averaged. The split needs ground
    truth about its images, as the drawn scenes have.
    """
    models = [model] if isinstance(model, Model) else list(model)
    if not models:
        raise ConfigError("nothing to evaluate: no model given")
    made = make_foils(split, foils, max_captions, seed)
    measured = [measure_words(one, split, made.cases, progress, method) for one in models]
    scores = average_words(measured)
    return report_words(scores, made, split.name, bootstrap=bootstrap, seed=seed)


def report_words(
    scores: WordScores, made: Foils, split: str, *, bootstrap: int = 1000, seed: int = 0
) -> WordReport:
    """The report of word effects measured on foils."""
    images, cluster = np.unique([case.image for case in scores.cases], return_inverse=True)
    resamples = Resamples(len(images), bootstrap, seed)
    cluster_of_word = np.repeat(cluster, [len(case.wrong) for case in scores.cases])
    suspicion = -np.concatenate(scores.effects)
    wrong = np.concatenate([case.labels for case in scores.cases])
    pooled = Ranking(suspicion, wrong)
    each = [Ranking(-e, c.labels) for e, c in zip(scores.effects, scores.cases, strict=True)]
    right = (scores.true > scores.false).astype(np.float64)
    return WordReport(
        split=split,
        images=len(images),
        captions=made.captions,
        foils=len(scores.cases),
        left_out=made.left_out,
        words=len(wrong),
        positives=int(wrong.sum()),
        method=scores.method,
        word_auc=resamples.pooled(pooled.auc, cluster_of_word),
        word_ap=resamples.pooled(pooled.average_precision, cluster_of_word),
        caption_auc=resamples.mean([float(one.auc()) for one in each], cluster),
        caption_ap=resamples.mean([float(one.average_precision()) for one in each], cluster),
        ap_chance=float(100.0 * wrong.mean()),
        pair_accuracy=resamples.mean(right, cluster),
        kinds={
            kind: _kind(kind, scores, right, suspicion, (cluster, cluster_of_word), resamples)
            for kind in KINDS
            if any(kind in case.kinds for case in scores.cases)
        },
        bootstrap=bootstrap,
        seed=seed,
    )


def _kind(
    kind: str,
    scores: WordScores,
    right: Values,
    suspicion: Values,
    clusters: tuple[NDArray[np.intp], NDArray[np.intp]],
    resamples: Resamples,
) -> KindReport:
    cluster, cluster_of_word = clusters
    pure = np.array([case.kinds == {kind} for case in scores.cases])
    names = np.array([name for case in scores.cases for name in case.wrong])
    judged = (names == "") | (names == kind)
    return KindReport(
        pairs=int(pure.sum()),
        pair_accuracy=resamples.mean(np.where(pure, right, np.nan), cluster),
        words=int((names == kind).sum()),
        word_auc=resamples.pooled(
            Ranking(suspicion[judged], names[judged] == kind).auc, cluster_of_word[judged]
        ),
    )


class Resamples:
    """Bootstrap resamples of images: ``counts`` [resamples, images] says how often each is drawn.

    Captions of one image are not independent, so whole images are drawn.
    """

    def __init__(self, images: int, resamples: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.counts = np.zeros((resamples, images), dtype=np.int64)
        for row in self.counts:
            row += np.bincount(rng.integers(0, images, images), minlength=images)

    def pooled(self, metric: Callable[..., Values], cluster: NDArray[np.intp]) -> Measured:
        """A metric of all items, weighted per resample; item ``k`` belongs to ``cluster[k]``."""
        step = max(1, CHUNK_CELLS // max(1, len(cluster)))
        starts = range(0, len(self.counts), step)
        resampled = [metric(self.counts[start : start + step][:, cluster]) for start in starts]
        return _measured(float(metric()), np.concatenate([*resampled, np.empty(0)]))

    def mean(self, values: Sequence[float] | Values, cluster: NDArray[np.intp]) -> Measured:
        """The mean of the values that are not NaN."""
        each = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(each)
        images = self.counts.shape[1]
        sums = np.bincount(cluster[known], each[known], minlength=images)
        sizes = np.bincount(cluster[known], minlength=images)
        with np.errstate(invalid="ignore"):
            resampled = (self.counts @ sums) / (self.counts @ sizes)
        return _measured(float(each[known].mean()) if known.any() else float("nan"), resampled)


def _measured(value: float, resampled: Values) -> Measured:
    """In percent, with an interval over the resamples that are not NaN."""
    resampled = resampled[~np.isnan(resampled)]
    low, high = interval(100.0 * resampled) if len(resampled) else (0.0, 0.0)
    return Measured(value=100.0 * value, interval=(low, high) if len(resampled) else None)


def evaluate_rule_words(
    model: Model,
    split: Split,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    per_caption: int = 1,
    most: int | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    method: Method | None = None,
    progress: Progress | None = None,
) -> WordReport:
    """Measure how well word effects find the words that a rule exchanged."""
    made = rule_cases(split, kinds=kinds, per_caption=per_caption, most=most, seed=seed)
    scores = measure_words(model, split, made.cases, progress, method)
    return report_words(scores, made, split.name, bootstrap=bootstrap, seed=seed)


class Ranking:
    """AUC and average precision of scored items for any weights; equal scores are one step.

    Items are sorted once, so that a resample costs one cumulative sum. ``weights`` are [..., n],
    by default 1; results have their leading shape, and are NaN without positives or negatives.
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
        positives, negatives = self._counts(weights)
        before = np.diff(negatives, axis=-1, prepend=0.0)
        outranked = negatives[..., -1:] - negatives + before / 2
        pairs = positives[..., -1] * negatives[..., -1]
        steps = np.diff(positives, axis=-1, prepend=0.0)
        return _share((steps * outranked).sum(-1), pairs)

    def average_precision(self, weights: ArrayLike | None = None) -> Values:
        """Mean over the positives of the precision at each one's score, ties included."""
        positives, negatives = self._counts(weights)
        precision = np.nan_to_num(_share(positives, positives + negatives))
        steps = np.diff(positives, axis=-1, prepend=0.0)
        return _share((steps * precision).sum(-1), positives[..., -1])

    def _counts(self, weights: ArrayLike | None) -> tuple[Values, Values]:
        """Positives and negatives down to each distinct score, [..., steps]."""
        if not len(self.order):
            return np.zeros(1), np.zeros(1)
        each = np.ones(len(self.order)) if weights is None else np.asarray(weights, np.float64)
        each = each if weights is None else each[..., self.order]
        positives = np.cumsum(each * self.labels, axis=-1)[..., self.ends]
        negatives = np.cumsum(each * ~self.labels, axis=-1)[..., self.ends]
        return positives, negatives


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


def choose_word_method(model: Model, dev: Split, seed: int = 0) -> Method | None:
    """The method whose effects most often have the right sign, in captions with exchanged words.

    An explanation says of each word whether it speaks for the match or against it, so the order of
    the effects is not enough: gradients rank exchanged words well, but are below 0 for most words
    of true captions, too. None if there is no choice: no words to exchange, or a model with one
    method only. Attention rollout is no candidate, because it has no direction.
    """
    try:
        if has_truth(dev):
            made = make_foils(dev, 1, CHOICE_CAPTIONS, seed)
        else:
            made = rule_cases(dev, most=CHOICE_CAPTIONS, seed=seed)
    except (ConfigError, DataError):  # captions that no rule knows
        return None
    accuracies: dict[Method, float] = {}
    for method in METHODS:
        if method in UNSIGNED:
            continue
        with suppress(ConfigError, DataError):  # the model has no such method; effects of NaN
            measured = measure_words(model, dev, made.cases, method=method)
            accuracies[method] = sign_accuracy(measured.cases, measured.effects)
    finite = {method: share for method, share in accuracies.items() if np.isfinite(share)}
    if len(finite) < 2:
        return None
    best = max(finite.values())
    return next(method for method, share in finite.items() if share == best)
