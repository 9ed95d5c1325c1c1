"""Weights of signs learned from checked captions: a logistic regression near the default weights.

The measured signs are weighed, and one more, whose default weight is 0: ``copies``, the
`copy_disagreement` of captions that were copied to a wrong image. How much it says depends on how
the errors were made, which labels tell.

The prior is the default audit itself: its suspicion is a logistic function of the doubt. A weight
moves away from its default only as far as the checked captions say so.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.audit.neighbors import Neighbors, copy_disagreement
from counterfoil.audit.suspicion import (
    MEASURED_SIGNS,
    WEIGHTS,
    WHOLE_CENTER,
    Scale,
    Values,
    deviations_of,
    evidence,
)
from counterfoil.core.errors import ArgumentError
from counterfoil.core.printable import plural
from counterfoil.evaluation.words.evaluate import roc_auc

WEIGHED_SIGNS = (*MEASURED_SIGNS, "copies")

PRIOR_STRENGTH = 30.0
"""Penalty per squared change of a weight. Chosen on the dev split of Flickr8k among 1, 3, 10, 30
and 100: smaller ones made rankings worse with 50 checked captions and exchanged words."""

MIN_OF_EACH = 5
"""Right and wrong captions below which the default weights stay; chosen on the same split."""

REVERSED_FROM = 2.5
"""Deviations of chance by which agreement is below one half if labels are likely reversed."""

INTERCEPT_STRENGTH = 0.01
STEPS, TOLERANCE = 100, 1e-9


@dataclass(frozen=True)
class SignWeights:
    """The weights of signs, in units of the default ones, and the checked captions behind them.

    ``learned`` is False if those were too few, so that the weights are the default ones.
    ``agreement`` is the AUC of the default suspicion on the checked captions.
    """

    weights: dict[str, float]
    right: int
    wrong: int
    learned: bool
    agreement: float | None = None

    def suspicion(self, deviations: Values) -> Values:
        """Suspicion [n] from the deviations [n, weighed signs] of all captions of a split."""
        doubts = _known(deviations) @ np.array([self.weights[sign] for sign in WEIGHED_SIGNS])
        return evidence(Scale.of_usual(doubts).z(doubts), WHOLE_CENTER)

    def _look_reversed(self) -> bool:
        """Whether captions marked right are more suspicious than those marked wrong, beyond chance.

        By the Mann-Whitney test: few labels, or those of a review, are often below one half.
        """
        if self.agreement is None:
            return False
        chance = math.sqrt((self.right + self.wrong + 1) / (12 * self.right * self.wrong))
        return self.agreement < 0.5 - REVERSED_FROM * chance

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def note(self) -> str:
        """A line for the reader of a report."""
        count = self.right + self.wrong
        captions = f"{plural(count, 'checked caption')} ({self.wrong} wrong)"
        if not self.learned:
            return (
                f"{captions} {'is' if count == 1 else 'are'} too few to learn weights of signs "
                f"from, which needs at least {MIN_OF_EACH} right and {MIN_OF_EACH} wrong ones: the "
                "default weights were used"
            )
        each = ", ".join(
            f"{sign} {weight:.2f} ({WEIGHTS.get(sign, 0.0):g})"
            for sign, weight in self.weights.items()
        )
        note = f"weights of signs learned from {captions}, default in parentheses: {each}"
        if self._look_reversed():
            note += (
                ". Captions marked wrong look less suspicious than those marked right: are the "
                "labels reversed?"
            )
        return note


def weighed_deviations(deviations: Values, own: Values, neighbors: Neighbors) -> Values:
    """Deviations [n, weighed signs] from those of the measured signs of the same captions.

    ``own`` [n] are the scores with the own image; ``neighbors`` are by image and by caption.
    """
    if neighbors.by_caption is None:
        raise ArgumentError("copies need neighbors by caption: find_neighbors finds them")
    copies = copy_disagreement(neighbors.by_caption, reliability(own))
    return np.column_stack([deviations, deviations_of(copies)])


def reliability(own: Values) -> Values:
    """Weights [n] of pairs as neighbors: a pair that fits badly says little about others."""
    return evidence(-deviations_of(-own), 0.0)


def learn_weights(
    deviations: Values, wrong: NDArray[np.bool_], checked: NDArray[np.bool_]
) -> SignWeights:
    """Weights from the deviations [n, weighed signs] of captions, some of which were checked.

    ``wrong`` is read at the ``checked`` ones only. Deterministic: the minimum is unique.
    """
    default = np.array([WEIGHTS.get(sign, 0.0) for sign in WEIGHED_SIGNS])
    values, labels = _known(deviations), wrong[checked].astype(np.float64)
    count, bad = len(labels), int(labels.sum())
    learned = min(bad, count - bad) >= MIN_OF_EACH
    weights, agreement = default, None
    if learned:
        doubts = values @ default
        agreement = roc_auc(doubts[checked], labels)
        usual = Scale.of_usual(doubts)
        unit = usual.spread or 1.0
        prior = np.concatenate([[-WHOLE_CENTER - usual.median / unit], default / unit])
        weights = unit * _fit(values[checked], labels, prior)[1:]
    named = dict(zip(WEIGHED_SIGNS, weights.tolist(), strict=True))
    return SignWeights(named, count - bad, bad, learned, agreement)


def _known(deviations: Values) -> Values:
    return np.nan_to_num(deviations, nan=0.0)


def _fit(values: Values, labels: Values, prior: Values) -> Values:
    """The intercept and weights of a logistic regression with a normal prior; Newton's method."""
    rows = np.column_stack([np.ones(len(values)), values])
    strength = np.full(len(prior), PRIOR_STRENGTH)
    strength[0] = INTERCEPT_STRENGTH

    def cost(weights: Values) -> float:
        logits = rows @ weights
        loss = np.logaddexp(0.0, logits) - labels * logits
        return float(loss.sum() + 0.5 * (strength * (weights - prior) ** 2).sum())

    weights, lowest = prior, cost(prior)
    for _ in range(STEPS):
        chance = evidence(rows @ weights, 0.0)
        gradient = rows.T @ (chance - labels) + strength * (weights - prior)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + np.diag(strength)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while (new := cost(weights - size * step)) > lowest and size > TOLERANCE:
            size /= 2
        if lowest - new <= TOLERANCE * max(1.0, abs(lowest)):
            break
        weights, lowest = weights - size * step, new
    return weights
