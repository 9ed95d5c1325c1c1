"""SelHN: the hardest negative, except where it would make the gradient vanish."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.objectives.base import Anchors, Context, NegativeSelection, Reduction, objectives
from counterfoil.objectives.triplet import HingeObjective, all_negatives_mask, hardest_negative_mask


@objectives.register("selhn")
class SelHN(HingeObjective):
    """SelHN, selective hard negatives: the hardest, or all where it ties with the positive.

    An anchor whose hardest negative is closer to its positive than ``epsilon`` averages over all
    its negatives, any other takes the hardest (SelHN eq. 9-12); the directions choose separately,
    and the choice carries no gradient. ``epsilon=0`` is `hardest`, an infinite one the mean
    `triplet`.

    Eq. 12 divides the sum over negatives by the batch size B; the authors' code divides by their
    number, B - 1, and so do we, which also stays a mean where the anchor has fewer negatives
    (repeated images, protected pairs). At a gap of exactly ``epsilon`` eq. 9 averages and the
    code takes the hardest; we follow the code, or ``epsilon=0`` would not be `hardest` on ties.

    ``reduction="mean"`` is the code's: mean over anchors, half of both directions. ``"sum"`` adds
    the anchors of both directions, on the scale of `hardest`.
    """

    averages_negatives = True

    def __init__(
        self, *, margin: float = 0.2, epsilon: float = 0.01, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(margin=margin, reduction=reduction)
        if epsilon < 0:
            raise ConfigError(f"objective.selhn.epsilon: at least 0, got {epsilon}")
        self.epsilon = epsilon

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        averaged = self.averaged(anchors)[:, None]
        return torch.where(averaged, all_negatives_mask(anchors), hardest_negative_mask(anchors))

    @torch.no_grad()
    def averaged(self, anchors: Anchors) -> Tensor:
        """Which anchors [P] average: those whose Δs (eq. 10) is below epsilon."""
        return (anchors.positive - anchors.hardest).abs() < self.epsilon

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "adaptive"

    def diagnostics(self, directions: tuple[Anchors, Anchors]) -> dict[str, Tensor]:
        averaged = torch.cat([self.averaged(anchors) for anchors in directions])
        return {"selhn/averaged": averaged.float().mean()}
