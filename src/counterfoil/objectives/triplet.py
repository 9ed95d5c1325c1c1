"""Triplet losses: a hinge on every negative, or on the hardest one."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    NegativeSelection,
    Objective,
    Reduction,
    both_directions,
    objectives,
)


class HingeObjective(Objective):
    """Hinge costs of each anchor's negatives, weighted by a selection of negatives.

    A subclass implements `weights` [P, C], zero for negatives that are not selected.
    ``reduction="sum"`` sums all costs, as VSE++ and SCAN do. ``"mean"`` averages over the selected
    negatives of an anchor, over anchors and over the two directions, as RVSE++ does.
    ``averages_negatives`` averages over the selected negatives in both reductions.
    """

    averages_negatives: bool = False

    def __init__(self, *, margin: float = 0.2, reduction: Reduction = "sum") -> None:
        super().__init__()
        self._require_nonnegative(margin=margin)
        self.margin, self.reduction = margin, reduction

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        """Weight [P, C] of each candidate."""
        raise NotImplementedError

    def anchors(
        self, scores: Tensor, positives: Tensor, context: Context
    ) -> tuple[Anchors, Anchors]:
        """The anchors of image → text and of text → image."""
        return both_directions(scores, positives, context)

    def diagnostics(self, directions: tuple[Anchors, Anchors]) -> dict[str, Tensor]:
        """Values for the training log, besides those of every objective."""
        return {}

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        directions = self.anchors(scores, positives, context)
        return LossReport(
            self.cost(directions, context),
            self.diagnostics(directions) if context.logging else {},
        )

    def cost(self, directions: tuple[Anchors, Anchors], context: Context) -> Tensor:
        """The loss of both directions."""
        losses = [self._one_direction(anchors, context) for anchors in directions]
        loss = losses[0] + losses[1]
        return loss if self.reduction == "sum" else loss / 2

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The margin per anchor: exact for one selected negative, or a mean over them."""
        return self.margin if self.reduction == "mean" else 2 * anchors * self.margin

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin

    def _one_direction(self, anchors: Anchors, context: Context) -> Tensor:
        weights = self.weights(anchors, context)
        per_anchor = (hinge(anchors, self.margin) * weights).sum(1)
        if self.averages_negatives or self.reduction == "mean":
            per_anchor = per_anchor / weights.sum(1).clamp(min=1)
        return per_anchor.sum() if self.reduction == "sum" else per_anchor.mean()


def hinge(anchors: Anchors, margin: float) -> Tensor:
    """[margin + candidate - positive]₊ for every candidate of every anchor, [P, C]."""
    return (margin + anchors.scores - anchors.positive[:, None]).clamp(min=0)


@objectives.register("triplet")
class Triplet(HingeObjective):
    """Hinge on every negative of the batch (VSE0)."""

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        return all_negatives_mask(anchors)

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        return _uninformed_triplet(self, anchors, negatives)


def _uninformed_triplet(hinge: HingeObjective, anchors: int, negatives: float) -> float:
    return hinge.margin if hinge.reduction == "mean" else 2 * anchors * negatives * hinge.margin


@objectives.register("hardest")
class HardestNegative(HingeObjective):
    """Hinge on the hardest negative of each anchor (VSE++); ``warmup_epochs`` use all negatives."""

    def __init__(
        self, *, margin: float = 0.2, reduction: Reduction = "sum", warmup_epochs: int = 0
    ) -> None:
        super().__init__(margin=margin, reduction=reduction)
        self._require_nonnegative(warmup_epochs=warmup_epochs)
        self.warmup_epochs = warmup_epochs

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        if context.epoch < self.warmup_epochs:
            return all_negatives_mask(anchors)
        return hardest_negative_mask(anchors)

    def cost(self, directions: tuple[Anchors, Anchors], context: Context) -> Tensor:
        """The cost that `weights` defines, computed without a weight matrix."""
        if context.epoch < self.warmup_epochs:
            return super().cost(directions, context)
        hardest = torch.stack([hardest_score(anchors) for anchors in directions])
        costs = (self.margin + hardest - directions[0].positive).clamp(min=0)
        if self.reduction == "sum":
            return costs.sum(1).sum()
        return costs.mean(1).sum() / 2

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        if epoch < self.warmup_epochs:
            return _uninformed_triplet(self, anchors, negatives)
        return super().loss_at_equal_scores(anchors, negatives, epoch)

    def never_reached(self, epochs: int, steps_per_epoch: int) -> list[str]:
        if not self.warmup_epochs or self.warmup_epochs < epochs:
            return []
        return [f"warmup_epochs={self.warmup_epochs}: no epoch selects the hardest negatives"]

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "all" if epoch < self.warmup_epochs else "hardest"


def all_negatives_mask(anchors: Anchors) -> Tensor:
    """Weight 1 for each negative of each anchor [P, C]."""
    return anchors.is_negative.to(anchors.scores.dtype)


def hardest_negative_mask(anchors: Anchors) -> Tensor:
    """Weight 1 for each anchor's hardest negative [P, C]; zero without negatives."""
    ranked = anchors.scores.detach().masked_fill(~anchors.is_negative, -torch.inf)
    chosen = torch.zeros_like(ranked).scatter_(1, ranked.argmax(1, keepdim=True), 1.0)
    return chosen * anchors.is_negative


def hardest_score(anchors: Anchors) -> Tensor:
    """Score [P] of each anchor's hardest negative; -inf without negatives, one of several ties."""
    # log 0 = -inf and log 1 = 0: the backward pass of a sum is free, that of masked_fill is not
    return (anchors.scores + anchors.is_negative.log()).max(1).values
