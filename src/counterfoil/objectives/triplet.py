"""Triplet losses: a hinge on every negative, or on the hardest one."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    Reduction,
    both_directions,
    objectives,
)


class HingeObjective(Objective):
    """Hinge costs of each anchor's negatives, weighted by a choice of negatives.

    A subclass says which negatives count: `weights` returns [P, C], zero for a negative that is
    left out. ``reduction="sum"`` adds everything up, as VSE++ and SCAN do; ``"mean"`` averages over
    anchors and over each anchor's chosen negatives, then over the two directions, as RVSE++ does.
    """

    def __init__(self, *, margin: float = 0.2, reduction: Reduction = "sum") -> None:
        super().__init__()
        self.margin, self.reduction = margin, reduction

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        raise NotImplementedError

    def forward(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        directions = both_directions(scores, positives)
        losses = [self._one_direction(anchors, context) for anchors in directions]
        loss = losses[0] + losses[1]
        return LossReport(
            loss if self.reduction == "sum" else loss / 2, hinge_diagnostics(directions)
        )

    def _one_direction(self, anchors: Anchors, context: Context) -> Tensor:
        costs = (self.margin + anchors.candidates - anchors.positive[:, None]).clamp(min=0)
        weights = self.weights(anchors, context)
        per_anchor = (costs * weights).sum(1)
        if self.reduction == "sum":
            return per_anchor.sum()
        return (per_anchor / weights.sum(1).clamp(min=1)).mean()


@torch.no_grad()
def hinge_diagnostics(directions: tuple[Anchors, Anchors]) -> dict[str, Tensor]:
    """Mean positive score, mean hardest negative, and their mean gap (SelHN's Δs)."""
    positive = torch.cat([anchors.positive for anchors in directions])
    hardest = torch.cat([anchors.hardest for anchors in directions])
    met = hardest.isfinite()
    if not met.any():
        return {"positive": positive.mean()}
    return {
        "positive": positive.mean(),
        "hardest_negative": hardest[met].mean(),
        "gap": (positive - hardest)[met].mean(),
    }


@objectives.register("triplet")
class Triplet(HingeObjective):
    """Hinge on every negative of the batch (VSE0)."""

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        return anchors.negative.to(anchors.candidates.dtype)


@objectives.register("hardest")
class HardestNegative(HingeObjective):
    """Hinge on the hardest negative of each anchor (VSE++); the first epochs may use all."""

    def __init__(
        self, *, margin: float = 0.2, reduction: Reduction = "sum", warmup_epochs: int = 0
    ) -> None:
        super().__init__(margin=margin, reduction=reduction)
        self.warmup_epochs = warmup_epochs

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        if context.epoch < self.warmup_epochs:
            return anchors.negative.to(anchors.candidates.dtype)
        return one_hardest(anchors)


def one_hardest(anchors: Anchors) -> Tensor:
    """Weight one on each anchor's hardest negative, nothing where it has no negative."""
    ranked = anchors.candidates.detach().masked_fill(~anchors.negative, -torch.inf)
    chosen = torch.zeros_like(ranked).scatter_(1, ranked.argmax(1, keepdim=True), 1.0)
    return chosen * anchors.negative
