"""SSP: polynomials of the positive and of the hardest negative (universal weighting)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    both_directions,
    objectives,
)
from counterfoil.objectives.triplet import hardest_negative_mask

MAX_SIMILARITY = 1 - 1e-5


@objectives.register("ssp")
class SSP(Objective):
    """SSP (self-similarity polynomial): polynomial costs of a positive and its hardest negative.

    An anchor with hardest negative n > p - margin costs [positive(p)]₊ + [negative(n)]₊, both
    polynomials given by their coefficients, highest power first; any other anchor, and one whose
    positive is already perfect (p ≥ 1 - 1e-5), costs nothing. The sum over both directions is
    divided by the number of pairs. The published coefficients are for cosine scores.
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        positive: Sequence[float] = (0.2, -0.7, 0.5),
        negative: Sequence[float] = (0.9, -0.4, 0.03),
    ) -> None:
        super().__init__()
        self.margin = margin
        self.positive = _coefficients("positive", positive)
        self.negative = _coefficients("negative", negative)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        directions = both_directions(scores, positives, context)
        total = sum((self._one_direction(anchors) for anchors in directions), scores.new_zeros(()))
        return LossReport(total / max(len(directions[0].positive), 1))

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin

    def _one_direction(self, anchors: Anchors) -> Tensor:
        selected = hardest_negative_mask(anchors)
        hardest = (anchors.scores * selected).sum(1)
        violated = (hardest > anchors.positive - self.margin) & (anchors.positive < MAX_SIMILARITY)
        costs = polynomial(anchors.positive, self.positive).clamp(min=0)
        costs = costs + polynomial(hardest, self.negative).clamp(min=0)
        return costs.masked_fill(~(violated & selected.any(1)), 0).sum()


def _coefficients(name: str, given: Any) -> tuple[float, ...]:
    """Coefficients of a polynomial; raise unless they are one finite number or more."""
    numbers: list[Any] = list(given) if isinstance(given, (list, tuple)) else []
    finite = [
        type(one) is not bool and isinstance(one, Real) and math.isfinite(float(one))
        for one in numbers
    ]
    if not numbers or not all(finite):
        raise ConfigError(
            f"objective.ssp.{name}: expected a list of numbers, the coefficient of the highest "
            f"power first, got {given!r}"
        )
    return tuple(map(float, numbers))


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Value at ``x`` of a polynomial, coefficients highest power first (Horner)."""
    value = torch.zeros_like(x)
    for coefficient in coefficients:
        value = value * x + coefficient
    return value
