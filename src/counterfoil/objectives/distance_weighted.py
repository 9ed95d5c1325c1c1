"""Distance-weighted sampling: one random negative per anchor, from all distances alike."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.objectives.base import Anchors, Context, Reduction, objectives
from counterfoil.objectives.triplet import HingeObjective


@objectives.register("distance-weighted")
class DistanceWeighted(HingeObjective):
    """Hinge on one negative per anchor, sampled evenly over distances (HREM's "trip").

    Assumes that scores are cosines of unit vectors: the distance of a pair is √(2 - 2s). Random
    points on a sphere in ``dimension`` dimensions are nearly all √2 apart; a negative at distance d
    is drawn in inverse proportion to how common d is there, so that near ones are drawn as well.
    Distances below ``cut_off`` count as ``cut_off``, negatives at ``nonzero_cut_off`` (HREM: 1.7 on
    Flickr30K, 1.9 on COCO) or farther are never drawn. An anchor without a candidate costs nothing;
    the reference then drops the whole direction. Draws depend on the step alone,
    so that all processes of a run draw the same.
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        reduction: Reduction = "sum",
        dimension: int = 512,
        cut_off: float = 0.5,
        nonzero_cut_off: float = 1.7,
    ) -> None:
        super().__init__(margin=margin, reduction=reduction)
        self.dimension, self.cut_off, self.nonzero_cut_off = dimension, cut_off, nonzero_cut_off

    @torch.no_grad()
    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        odds = self.probabilities(anchors)
        drawable = odds.sum(1, keepdim=True) > 0
        generator = torch.Generator(odds.device).manual_seed(context.step)
        # a row needs some mass to be drawn from
        drawn = torch.multinomial(odds + ~drawable, 1, generator=generator)
        return torch.zeros_like(anchors.scores).scatter_(1, drawn, 1.0) * drawable

    @torch.no_grad()
    def probabilities(self, anchors: Anchors) -> Tensor:
        """Chance of each candidate [P, C] to be drawn; rows of zeros where there is none."""
        distance = (2 - 2 * anchors.scores.double()).clamp(0, 4).sqrt()
        allowed = anchors.is_negative & (distance < self.nonzero_cut_off)
        distance = distance.clamp(min=self.cut_off)
        # log of 1 / q(d), with q(d) ∝ d^(n-2) · (1 - d²/4)^((n-3)/2)
        commonness = (self.dimension - 2) * distance.log()
        commonness += (self.dimension - 3) / 2 * (1 - distance.square() / 4).clamp(min=1e-12).log()
        rarity = (-commonness).masked_fill(~allowed, -torch.inf)
        return rarity.softmax(1).nan_to_num(0.0)
