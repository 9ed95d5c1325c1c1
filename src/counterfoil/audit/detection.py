"""Scores of wrong captions by several methods, and how well each of them detects planted errors.

Beside the audit's suspicion, with default weights and with those learned from labels: the
similarity alone, LEMoN's score of multimodal neighbors (Zhang et al., ICML 2025) and NCR's mixture
of losses (Huang et al., 2021), all with the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from counterfoil.audit.audit import Audit
from counterfoil.audit.neighbors import Ints, Neighbors, Side, find_neighbors
from counterfoil.audit.noise import Marks, NoisySplit, one_caption_each, plant
from counterfoil.audit.sign_weights import learn_weights, weighed_deviations
from counterfoil.audit.suspicion import Scale, Values, sign_deviations
from counterfoil.core.errors import ArgumentError
from counterfoil.core.progress import Progress
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.evaluation.report import Report
from counterfoil.evaluation.words.evaluate import Ranking
from counterfoil.models.model import Model
from counterfoil.objectives.base import both_directions
from counterfoil.objectives.ncr import clean_probability, pair_losses
from counterfoil.scoring.encode import encode_texts

FALSE_ALARMS = 0.05
"""Share of the clean captions above the threshold that is chosen without labels."""

MIXTURE, AUDIT, TUNED_AUDIT = "mixture of losses (NCR)", "audit", "audit, tuned on labels"
PROBABILITIES = frozenset({MIXTURE, AUDIT, TUNED_AUDIT})
"""Methods whose scores lie between 0 and 1 for every model, so that folds need no common scale."""

METHODS = (
    "similarity",
    MIXTURE,
    "LEMoN, fixed weights",
    "LEMoN, tuned on dev",
    "LEMoN, tuned on labels",
    AUDIT,
    TUNED_AUDIT,
)
"""All methods, in the order of tables."""

CURVE_POINTS = 50
LOSS_BATCH, LOSS_MARGIN = 128, 0.2
"""Batch and margin of NCR's losses, as in its paper."""


@dataclass(frozen=True)
class Weights:
    """LEMoN's: β and γ of both sides, τ₁ of their distances, τ₂ of the neighbors' own matches."""

    by_image: float = 5.0
    by_caption: float = 5.0
    near: float = 0.1
    match: float = 5.0


FIXED = Weights()
"""The setting of LEMoN's public code for data without labels."""

TUNED_ON_DEV = Weights(by_image=20.0, by_caption=10.0, near=10.0, match=1.0)
"""The weights of the grid with the best mean F1 on the dev split of Flickr8k with photos-vse: all
three noises at 40 and 10 %, seeds 10 to 12 (``reproduction/audit/run.sh lemon``)."""

SIDE_GRID = tuple(float(value) for value in range(0, 101, 5))
DECAY_GRID = (0.0, 1.0, 5.0, 10.0)
"""LEMoN's grid of the weights that it tunes on labels: β and γ, and τ₁ and τ₂."""


def lemon_score(neighbors: Neighbors, weights: Weights = FIXED) -> Values:
    """d(x, y) + β·sₙ + γ·sₘ [pairs]; higher is more likely wrong.

    sₙ is the mean over the neighbors of the image of d(y, yⱼ)·exp(−τ₁·d(x, xⱼ))·exp(−τ₂·d(xⱼ, yⱼ)),
    sₘ the same over the neighbors of the caption, with images and captions exchanged.
    """
    first, second = _side_scores(neighbors, weights.near, weights.match)
    whole = neighbors.match + weights.by_image * first + weights.by_caption * second
    return np.asarray(whole, dtype=np.float64)


def _side_scores(neighbors: Neighbors, near: float, match: float) -> tuple[Values, Values]:
    if neighbors.by_caption is None:
        raise ArgumentError("LEMoN's score needs neighbors by caption: find_neighbors finds them")
    first = _side_score(neighbors.by_image, near, match)
    return first, _side_score(neighbors.by_caption, near, match)


def _side_score(side: Side, near: float, match: float) -> Values:
    terms = side.gap * np.exp(-near * side.near) * np.exp(-match * side.match)
    known = np.maximum(1, (~np.isnan(terms)).sum(1))
    return np.asarray(np.nansum(terms, axis=1) / known, dtype=np.float64)


def tune_lemon(neighbors: Neighbors, labels: Marks, known: Marks) -> Weights:
    """The weights of LEMoN's grid with the best F1 on the pairs of ``known`` labels."""
    return best_lemon([(neighbors, labels, known)])[0]


def best_lemon(parts: Sequence[tuple[Neighbors, Marks, Marks]]) -> tuple[Weights, float]:
    """The weights of LEMoN's grid with the best mean F1 over noisy data, and that F1.

    Each part is neighbors, labels, and the pairs whose labels are known. Parts without a known
    error say nothing; if none has one, the weights are the fixed ones.
    """
    known_parts = [
        (neighbors, labels[known], known)
        for neighbors, labels, known in parts
        if (labels & known).any()
    ]
    best, chosen = -1.0, FIXED
    if not known_parts:
        return chosen, 0.0
    for near, match in product(DECAY_GRID, DECAY_GRID):
        sides = [
            (neighbors.match[known], [side[known] for side in _side_scores(neighbors, near, match)])
            for neighbors, _, known in known_parts
        ]
        for beta, gamma in product(SIDE_GRID, SIDE_GRID):
            scores = [
                own.astype(np.float64) + beta * first + gamma * second
                for own, (first, second) in sides
            ]
            marks = (part[1] for part in known_parts)
            value = float(np.mean([best_f1(*each)[0] for each in zip(scores, marks, strict=True)]))
            if value > best:
                best, chosen = value, Weights(beta, gamma, near, match)
    return chosen, best


def tune_on_noise(
    model: Model,
    split: Split,
    noises: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    one_caption: bool = False,
    progress: Progress | None = None,
) -> tuple[Weights, float]:
    """LEMoN's weights with the best mean F1 over noises, rates and seeds, and that F1 in percent.

    ``one_caption``: use one caption per image, as LEMoN does. The labels of all measured captions
    are read, so nothing else is to be measured on this split.
    """
    parts = []
    for noise, rate, seed in product(noises, rates, seeds):
        used = one_caption_each(split, seed) if one_caption else split
        noisy = plant(used, noise, rate, seed)
        neighbors = find_neighbors(model, noisy.split, seed=seed, progress=progress)
        captions = neighbors.captions
        parts.append((neighbors, noisy.wrong[captions], noisy.measured[captions]))
    return best_lemon(parts)


@torch.inference_mode()
def loss_score(model: Model, split: Split, captions: Ints, seed: int = 0) -> Values:
    """NCR's probability [captions] that a pair is mismatched, of the given, readable captions.

    The loss of a pair is its mean hinge cost in a random batch. The probability is that of the
    upper of two Gaussians of these losses; equal ones are ordered by the loss.
    """
    table = model.fragments_of(split)
    losses = np.zeros(len(captions))
    order = np.random.default_rng(seed).permutation(len(captions))
    with eval_mode(model):
        for start in range(0, len(order), LOSS_BATCH):
            # the last batch is filled up, as a loss depends on the size of its batch
            chosen = order[start : start + LOSS_BATCH]
            filled = captions[np.concatenate([chosen, order[: LOSS_BATCH - len(chosen)]])]
            owner = torch.from_numpy(split.image_of[filled]).to(model.device)
            items = pad_fragments([table.read(int(split.image_of[k])) for k in filled])
            images = model.encode_images(items.to(model.device))
            known = [known_text(model.text, split.texts[int(number)]).text for number in filled]
            texts = encode_texts(model, known)
            both = both_directions(model.matcher(images, texts), owner[:, None] == owner[None])
            batch = pair_losses(both, LOSS_MARGIN)[: len(chosen)]
            losses[chosen] = batch.double().cpu().numpy()
    scaled = (losses - losses.min()) / (np.ptp(losses) or 1.0)
    return 1 - clean_probability(losses) + 1e-6 * scaled


def method_scores(
    model: Model, noisy: NoisySplit, audit: Audit, seed: int = 0
) -> dict[str, Values]:
    """The score [captions] of each method, higher for wrong captions; NaN if not scored."""
    captions = audit.survey.captions
    neighbors = find_neighbors(model, noisy.split, captions, seed=seed)
    wrong, labeled = noisy.wrong[captions], noisy.labeled[captions]
    tuned = tune_lemon(neighbors, wrong, labeled)
    signs = sign_deviations(audit.values[captions], audit.scales.signs)
    weighed = weighed_deviations(signs, audit.survey.own[captions].astype(np.float64), neighbors)
    learned = learn_weights(weighed, wrong, labeled)

    def spread(values: Values) -> Values:
        every = np.full(len(noisy.wrong), np.nan)
        every[captions] = values
        return every

    scores = (
        -audit.survey.own.astype(np.float64),
        spread(loss_score(model, noisy.split, captions, seed)),
        spread(lemon_score(neighbors)),
        spread(lemon_score(neighbors, TUNED_ON_DEV)),
        spread(lemon_score(neighbors, tuned)),
        audit.suspicion,
        spread(learned.suspicion(weighed)),
    )
    return dict(zip(METHODS, scores, strict=True))


def standardize(scores: Mapping[str, Values]) -> dict[str, Values]:
    """Scores in robust deviations, so that those of several folds can be ranked together.

    Probabilities stay as they are: they are comparable, and most of them are near 0 or 1, so that
    a robust deviation says nothing about them.
    """
    result = {}
    for name, values in scores.items():
        if name in PROBABILITIES:
            result[name] = values
            continue
        known = ~np.isnan(values)
        result[name] = np.full(len(values), np.nan)
        result[name][known] = Scale.of(values[known]).z(values[known])
    return result


class Detection(Report):
    """How well one method detects wrong captions, in percent.

    ``f1_clean``: at the threshold that 5 % of the captions of the clean share exceed, so that no
    error has to be known. ``f1_labeled``: at the threshold that is best on the labeled share.
    ``f1_best``: at the threshold that is best on the measured captions themselves, which nobody
    knows in practice. ``precision`` and ``recall`` belong to ``f1_clean``. ``curve`` has (recall,
    precision) at equal steps of recall.
    """

    auroc: float
    auprc: float
    f1_clean: float
    precision: float
    recall: float
    f1_labeled: float
    f1_best: float
    curve: tuple[tuple[float, float], ...]


def detect(values: Values, noisy: NoisySplit) -> Detection:
    """Measure a method by its scores [captions]; captions without a score are left out."""
    known = ~np.isnan(values)
    measured = noisy.measured & known
    scores, labels = values[measured], noisy.wrong[measured]
    ranking = Ranking(scores, labels)
    clean = values[noisy.clean & known]
    limit = float(np.quantile(clean, 1 - FALSE_ALARMS)) if len(clean) else np.nan
    precision, recall, f1 = _at(scores > limit, labels)
    marked = noisy.labeled & known
    _, threshold = best_f1(values[marked], noisy.wrong[marked])
    return Detection(
        auroc=100 * float(ranking.auc()),
        auprc=100 * float(ranking.average_precision()),
        f1_clean=f1,
        precision=precision,
        recall=recall,
        f1_labeled=_at(scores >= threshold, labels)[2],
        f1_best=best_f1(scores, labels)[0],
        curve=_curve(scores, labels),
    )


def _at(listed: Marks, labels: Marks) -> tuple[float, float, float]:
    """Precision, recall and F1 in percent."""
    hits = int((listed & labels).sum())
    precision = 100.0 * hits / max(1, int(listed.sum()))
    recall = 100.0 * hits / max(1, int(labels.sum()))
    return precision, recall, 200.0 * hits / max(1, int(listed.sum()) + int(labels.sum()))


def best_f1(scores: Values, labels: Marks) -> tuple[float, float]:
    """The best F1 in percent over all thresholds, and the threshold; (0, ∞) without positives.

    >>> best_f1(np.array([0.9, 0.8, 0.1]), np.array([True, False, True]))
    (80.0, 0.1)
    """
    if not labels.any():
        return 0.0, float("inf")
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    hits = np.cumsum(labels[order])
    f1 = 2 * hits / (np.arange(1, len(ranked) + 1) + hits[-1])
    f1[np.flatnonzero(np.diff(ranked) == 0)] = 0.0  # equal scores are listed together
    best = int(np.argmax(f1))
    return 100.0 * float(f1[best]), float(ranked[best])


def _curve(scores: Values, labels: Marks) -> tuple[tuple[float, float], ...]:
    """(recall, precision) in percent: the first threshold that reaches each recall."""
    if not labels.any():
        return ()
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(labels[order])
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    wrong_listed, listed = hits[ends], ends + 1
    wanted = np.ceil(hits[-1] * np.arange(1, CURVE_POINTS + 1) / CURVE_POINTS)
    reached = np.searchsorted(wrong_listed, wanted)
    return tuple(
        (round(100 * share, 2), round(precision, 2))
        for share, precision in zip(
            (wrong_listed[reached] / hits[-1]).tolist(),
            (100 * wrong_listed[reached] / listed[reached]).tolist(),
            strict=True,
        )
    )
