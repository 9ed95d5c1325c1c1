"""Distance-weighted sampling: one random negative per anchor, uniform over distances."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.objectives.base import Anchors, Context, Reduction, objectives
from counterfoil.objectives.triplet import HingeObjective


@objectives.register("distance-weighted")
class DistanceWeighted(HingeObjective):
    """Hinge on one negative per anchor, sampled uniformly over distances (HREM's "trip").

    Assumes that scores are cosines of unit vectors: the distance of a pair is √(2 − 2s). Random
    points on a sphere in ``dimension`` dimensions are nearly all √2 apart. The sampling probability
    of a negative at distance d is inversely proportional to the density of d, so that near
    negatives are sampled as well. Distances below ``cut_off`` are raised to it. Negatives at
    ``nonzero_cut_off`` (HREM: 1.7 on Flickr30K, 1.9 on COCO) or farther are never sampled. An
    anchor without a candidate costs nothing; the reference then drops the whole direction. The
    step seeds the sampling, so that all processes of a run sample the same negatives.
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
        distances = {"cut_off": cut_off, "nonzero_cut_off": nonzero_cut_off}
        self._require_positive(dimension=dimension, **distances)
        self.dimension, self.cut_off, self.nonzero_cut_off = dimension, cut_off, nonzero_cut_off

    @torch.no_grad()
    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        probabilities = self.probabilities(anchors)
        has_candidates = probabilities.sum(1, keepdim=True) > 0
        generator = torch.Generator(probabilities.device).manual_seed(context.step)
        # multinomial needs a positive sum in each row
        sample = torch.multinomial(probabilities + ~has_candidates, 1, generator=generator)
        return torch.zeros_like(anchors.scores).scatter_(1, sample, 1.0) * has_candidates

    @torch.no_grad()
    def probabilities(self, anchors: Anchors) -> Tensor:
        """Sampling probability of each candidate [P, C]; zeros for an anchor without candidates."""
        distance = (2 - 2 * anchors.scores.double()).clamp(0, 4).sqrt()
        allowed = anchors.is_negative & (distance < self.nonzero_cut_off)
        distance = distance.clamp(min=self.cut_off)
        # log of 1 / q(d), with q(d) ∝ d^(n-2) · (1 - d²/4)^((n-3)/2)
        log_q = (self.dimension - 2) * distance.log()
        log_q += (self.dimension - 3) / 2 * (1 - distance.square() / 4).clamp(min=1e-12).log()
        logits = (-log_q).masked_fill(~allowed, -torch.inf)
        return logits.softmax(1).nan_to_num(0.0)
