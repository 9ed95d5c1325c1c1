"""Word-level truth: do a model's word effects find the words that are wrong?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError
from counterfoil.evaluation.bootstrap import interval
from counterfoil.evaluation.word_effects import WordScores, average_words, measure_words
from counterfoil.evaluation.word_foils import KINDS, Foils, make_foils
from counterfoil.evaluation.word_metrics import Ranking
from counterfoil.evaluation.word_report import KindReport, Measured, WordReport
from counterfoil.models.model import Model
from counterfoil.progress import Progress

Values = NDArray[np.float64]

CHUNK_CELLS = 4_000_000


def evaluate_words(
    model: Model | Sequence[Model],
    split: Split,
    *,
    foils: int = 1,
    max_captions: int | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> WordReport:
    """Make captions of a split false word by word, and see what the model's effects say of it.

    Several models are an ensemble: their scores and effects are averaged. Needs a split that knows
    the truth of its images, which the drawn scenes do.
    """
    models = [model] if isinstance(model, Model) else list(model)
    if not models:
        raise ConfigError("nothing to evaluate: no model given")
    made = make_foils(split, foils, max_captions, seed)
    found = average_words([measure_words(one, split, made.cases, progress) for one in models])
    return report_words(found, made, split.name, bootstrap=bootstrap, seed=seed)


def report_words(
    found: WordScores, made: Foils, split: str, *, bootstrap: int = 1000, seed: int = 0
) -> WordReport:
    """The report of word effects that were measured on foils."""
    images, cluster = np.unique([case.image for case in found.cases], return_inverse=True)
    resamples = _Resamples(len(images), bootstrap, seed)
    cluster_of_word = np.repeat(cluster, [len(case.wrong) for case in found.cases])
    suspicion = -np.concatenate(found.effects)
    wrong = np.concatenate([case.labels for case in found.cases])
    pooled = Ranking(suspicion, wrong)
    each = [Ranking(-e, c.labels) for e, c in zip(found.effects, found.cases, strict=True)]
    right = (found.true > found.false).astype(np.float64)
    return WordReport(
        split=split,
        images=len(images),
        captions=made.captions,
        foils=len(found.cases),
        left_out=made.left_out,
        words=len(wrong),
        positives=int(wrong.sum()),
        method=found.method,
        word_auc=resamples.pooled(pooled.auc, cluster_of_word),
        word_ap=resamples.pooled(pooled.average_precision, cluster_of_word),
        caption_auc=resamples.mean([float(one.auc()) for one in each], cluster),
        caption_ap=resamples.mean([float(one.average_precision()) for one in each], cluster),
        ap_chance=float(100.0 * wrong.mean()),
        pair_accuracy=resamples.mean(right, cluster),
        kinds={
            kind: _kind(kind, found, right, suspicion, (cluster, cluster_of_word), resamples)
            for kind in KINDS
            if any(kind in case.kinds for case in found.cases)
        },
        bootstrap=bootstrap,
        seed=seed,
    )


def _kind(
    kind: str,
    found: WordScores,
    right: Values,
    suspicion: Values,
    clusters: tuple[NDArray[np.intp], NDArray[np.intp]],
    resamples: _Resamples,
) -> KindReport:
    cluster, cluster_of_word = clusters
    pure = np.array([case.kinds == {kind} for case in found.cases])
    names = np.array([name for case in found.cases for name in case.wrong])
    judged = (names == "") | (names == kind)
    return KindReport(
        pairs=int(pure.sum()),
        pair_accuracy=resamples.mean(np.where(pure, right, np.nan), cluster),
        words=int((names == kind).sum()),
        word_auc=resamples.pooled(
            Ranking(suspicion[judged], names[judged] == kind).auc, cluster_of_word[judged]
        ),
    )


class _Resamples:
    """How often each image is drawn, in each resample; metrics follow for its captions and words.

    Captions of one image are not independent, so whole images are drawn.
    """

    def __init__(self, images: int, resamples: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.counts = np.zeros((resamples, images), dtype=np.int64)
        for row in self.counts:
            row += np.bincount(rng.integers(0, images, images), minlength=images)

    def pooled(self, metric: Callable[..., Values], cluster: NDArray[np.intp]) -> Measured:
        """A metric of all items together, given their weights; item ``k`` is of ``cluster[k]``."""
        step = max(1, CHUNK_CELLS // max(1, len(cluster)))
        starts = range(0, len(self.counts), step)
        again = [metric(self.counts[start : start + step][:, cluster]) for start in starts]
        return _measured(float(metric()), np.concatenate([*again, np.empty(0)]))

    def mean(self, values: Sequence[float] | Values, cluster: NDArray[np.intp]) -> Measured:
        """The mean of the values that are known (not NaN)."""
        each = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(each)
        images = self.counts.shape[1]
        sums = np.bincount(cluster[known], each[known], minlength=images)
        sizes = np.bincount(cluster[known], minlength=images)
        with np.errstate(invalid="ignore"):
            again = (self.counts @ sums) / (self.counts @ sizes)
        return _measured(float(each[known].mean()) if known.any() else float("nan"), again)


def _measured(value: float, again: Values) -> Measured:
    """In percent; resamples that drew nothing to measure do not count."""
    again = again[~np.isnan(again)]
    low, high = interval(100.0 * again) if len(again) else (0.0, 0.0)
    return Measured(value=100.0 * value, interval=(low, high) if len(again) else None)
