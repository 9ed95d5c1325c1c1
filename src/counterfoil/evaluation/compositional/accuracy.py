"""Metrics of compositional benchmarks with bootstrap intervals; a tie counts against the scorer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.data.text.words import caption_words
from counterfoil.evaluation.compositional.readers import Item, Span, Subset
from counterfoil.evaluation.report import Measured
from counterfoil.evaluation.retrieval import interval
from counterfoil.evaluation.words.evaluate import Ranking

Floats = NDArray[np.float64]

_BLOCK_CELLS = 4_000_000


@dataclass(frozen=True)
class Scored:
    """Scores [images, texts] of one item, its captions before its foils.

    ``similarity`` [texts, texts] compares the texts alone. ``effects`` are (start, end, effect) of
    the caption's words: the lowest effect marks the word that fits least.
    """

    scores: Floats
    similarity: Floats | None = None
    effects: Sequence[tuple[int, int, float]] | None = None


@dataclass(frozen=True)
class Mean:
    """A share: the weighted mean of one value per item; NaN: not measured for this item."""

    values: Floats
    weights: Floats


@dataclass(frozen=True)
class Detection:
    """Average precision of finding the items with wrong words by their suspicion."""

    suspicion: Floats
    is_wrong: NDArray[np.bool_]


Metric = Mean | Detection


def metric_names(benchmark: str, subset: Subset) -> tuple[str, ...]:
    """Names of the metrics of a subset, the main one first."""
    if subset.form == "square":
        return ("text", "image", "group")
    if subset.form == "words":
        return ("detection AP", "localization")
    if all(len(item.captions) > 1 for item in subset.items):
        return ("image-text", "text-only")
    return ("pairwise accuracy", "accuracy") if benchmark == "valse" else ("accuracy",)


def measure(
    names: Sequence[str], items: Sequence[Item], scored: Sequence[Scored]
) -> dict[str, Metric]:
    """The metrics ``names`` of scored items."""
    for item, one in zip(items, scored, strict=True):
        if not np.isfinite(one.scores).all():
            raise DataError(f"item '{item.key}': its score is not a finite number")
    if "group" in names:
        return from_outcomes([_square(one.scores) for one in scored])
    if "localization" in names:
        suspicion = np.array([-one.scores[0, 0] for one in scored])
        is_wrong = np.array([bool(item.wrong) for item in items])
        marked = [_localized(item, one) for item, one in zip(items, scored, strict=True)]
        return {"detection AP": Detection(suspicion, is_wrong), "localization": _mean(marked)}
    chosen = [_true_above(item, one.scores[0]) for item, one in zip(items, scored, strict=True)]
    metrics: dict[str, Metric] = {names[0]: Mean(np.array(chosen, float), _class_weights(items))}
    if "text-only" in names:
        alike = [_paraphrase_closest(item, one) for item, one in zip(items, scored, strict=True)]
        metrics["text-only"] = _mean(alike)
    if len(names) > 1 and names[1] == "accuracy":
        metrics["accuracy"] = _mean(_at_median(items, scored))
    return metrics


def from_outcomes(outcomes: Sequence[Sequence[bool]]) -> dict[str, Metric]:
    """Text, image and group score of (caption for image 0, 1; image for caption 0, 1)."""
    table = np.array(outcomes, dtype=bool)
    parts = {"text": table[:, :2], "image": table[:, 2:], "group": table}
    return {name: _mean([bool(row.all()) for row in part]) for name, part in parts.items()}


def chance(names: Sequence[str], items: Sequence[Item]) -> dict[str, float]:
    """The expected metrics of random scores, in percent."""
    if "group" in names:  # of the 24 orders of four scores, 4 are right in all comparisons
        return {"text": 25.0, "image": 25.0, "group": 100 / 6}
    if "localization" in names:
        shares = [_share_wrong(item) for item in items if item.wrong]
        prevalence = 100.0 * float(np.mean([bool(item.wrong) for item in items]))
        localized = 100.0 * float(np.mean(shares)) if shares else math.nan
        return {"detection AP": prevalence, "localization": localized}
    orders = [1 / math.comb(len(item.texts), len(item.captions)) for item in items]
    values = {names[0]: 100.0 * float(np.average(orders, weights=_class_weights(items)))}
    values.update(dict.fromkeys(names[1:], 50.0))
    if "text-only" in names:
        values["text-only"] = 100 / 3
    return values


def _mean(values: Sequence[float]) -> Mean:
    each = np.asarray(values, dtype=np.float64)
    return Mean(each, np.ones(len(each)))


def _class_weights(items: Sequence[Item]) -> Floats:
    """Weights that make a mean a macro mean over the classes of the items; 1 without classes."""
    sizes = Counter(item.label for item in items)
    return np.array([1.0 / sizes[item.label] if item.label else 1.0 for item in items])


def _true_above(item: Item, scores: Floats) -> bool:
    """Whether every true caption scores above every foil."""
    count = len(item.captions)
    return bool(scores[:count].min() > scores[count:].max())


def _square(scores: Floats) -> tuple[bool, bool, bool, bool]:
    (a, b), (c, d) = scores.tolist()
    return a > b, d > c, a > c, d > b


def _paraphrase_closest(item: Item, scored: Scored) -> float:
    """Whether two true captions are more similar to each other than each is to any foil."""
    if scored.similarity is None:
        return math.nan
    count = len(item.captions)
    true, foils = scored.similarity[:count, :count], scored.similarity[:count, count:]
    pairs = true[~np.eye(count, dtype=bool)]
    return float(pairs.min() > foils.max())


def _at_median(items: Sequence[Item], scored: Sequence[Scored]) -> list[float]:
    """Share of an item's texts on their side of the median of all: one half is called true."""
    threshold = float(np.median(np.concatenate([one.scores[0] for one in scored])))
    shares = []
    for item, one in zip(items, scored, strict=True):
        true, foils = np.split(one.scores[0], [len(item.captions)])
        shares.append(float(np.mean(np.append(true > threshold, foils < threshold))))
    return shares


def _localized(item: Item, scored: Scored) -> float:
    """Whether the words with the lowest effect are all wrong; NaN for a caption without errors."""
    if not item.wrong or scored.effects is None:
        return math.nan
    lowest = min((effect for _, _, effect in scored.effects), default=math.nan)
    spans = [(start, end) for start, end, effect in scored.effects if effect == lowest]
    return float(bool(spans) and all(_overlaps(span, item.wrong) for span in spans))


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


def _share_wrong(item: Item) -> float:
    spans = [(w.start, w.end) for w in caption_words(item.captions[0]) if not w.is_punctuation]
    return float(np.mean([_overlaps(span, item.wrong or ()) for span in spans])) if spans else 0.0


class Bootstrap:
    """Values of a metric on all items and on resamples, [1 + resamples].

    Items of one image are not independent, so whole images are drawn.
    """

    def __init__(self, items: Sequence[Item], resamples: int, seed: int) -> None:
        names = [item.images[0] for item in items]
        self.cluster = np.unique(names, return_inverse=True)[1]
        self.resamples, self.seed = resamples, seed

    def values(self, metric: Metric) -> Floats:
        """In percent; the first value is that of all items."""
        return 100.0 * np.concatenate([self._values(metric, count) for count in self._counts()])

    def _values(self, metric: Metric, counts: Floats) -> Floats:
        if isinstance(metric, Detection):
            ranking = Ranking(metric.suspicion, metric.is_wrong)
            return ranking.average_precision(counts[:, self.cluster])
        known = ~np.isnan(metric.values)
        weights = np.where(known, metric.weights, 0.0)
        sums = np.bincount(self.cluster, weights * np.where(known, metric.values, 0.0))
        sizes = np.bincount(self.cluster, weights)
        with np.errstate(invalid="ignore"):
            return np.asarray((counts @ sums) / (counts @ sizes), dtype=np.float64)

    def _counts(self) -> Iterator[Floats]:
        """How often each image is drawn [resamples, images], in blocks of bounded size."""
        size = int(self.cluster.max()) + 1
        yield np.ones((1, size))
        rng = np.random.default_rng(self.seed)
        step = max(1, _BLOCK_CELLS // max(size, len(self.cluster)))
        for start in range(0, self.resamples, step):
            rows = min(step, self.resamples - start)
            yield rng.multinomial(size, np.full(size, 1 / size), rows).astype(np.float64)


def measured(values: Floats) -> Measured:
    """The value of all items, with the 95 % interval of the resamples."""
    rest = values[1:][~np.isnan(values[1:])]
    bounds = interval(rest) if len(rest) and not math.isnan(values[0]) else None
    return Measured(value=float(values[0]), interval=bounds)
