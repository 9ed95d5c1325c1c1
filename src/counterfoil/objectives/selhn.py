"""SelHN: the hardest negative, unless its gradient would vanish (RVSE++, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.objectives.base import Anchors, Context, NegativeSelection, Reduction, objectives
from counterfoil.objectives.triplet import HingeObjective, all_negatives_mask, hardest_negative_mask


@objectives.register("selhn")
class SelHN(HingeObjective):
    """SelHN, selective hard negatives: the hardest negative, or all if it ties with the positive.

    An anchor averages over all its negatives if the scores of its positive and of its hardest
    negative differ by less than ``epsilon`` (eq. 9–12). Any other anchor takes the hardest. The two
    directions select separately, and the selection has no gradient. ``epsilon=0`` is `hardest`,
    an infinite one the mean `triplet`.

    Eq. 12 divides the sum over negatives by the batch size B, the authors' code by their number,
    B − 1. We follow the code: the result stays a mean if an anchor has fewer negatives (repeated
    images, protected pairs). At a gap of exactly ``epsilon`` eq. 9 averages and the code takes the
    hardest. We follow the code, so that ``epsilon=0`` equals `hardest` on ties.

    ``reduction="mean"`` is the code's: the mean over anchors and over both directions. ``"sum"``
    adds the anchors of both directions, on the scale of `hardest`.
    """

    averages_negatives = True
    may_be_infinite = ("epsilon",)

    def __init__(
        self, *, margin: float = 0.2, epsilon: float = 0.01, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(margin=margin, reduction=reduction)
        self._require_nonnegative(epsilon=epsilon)
        self.epsilon = epsilon

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        all_negatives = all_negatives_mask(anchors)  # eq. 12
        hardest = hardest_negative_mask(anchors)  # eq. 11
        return torch.where(self.is_tied(anchors)[:, None], all_negatives, hardest)  # eq. 9

    @torch.no_grad()
    def is_tied(self, anchors: Anchors) -> Tensor:
        """Whether each anchor [P] averages over its negatives."""
        delta_s = (anchors.positive - anchors.hardest).abs()  # eq. 10
        return delta_s < self.epsilon

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "adaptive"

    def diagnostics(self, directions: tuple[Anchors, Anchors]) -> dict[str, Tensor]:
        tied = torch.cat([self.is_tied(anchors) for anchors in directions])
        return {"selhn/averaged": tied.float().mean()}
