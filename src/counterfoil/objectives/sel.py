"""SEL: a hinge on the lowest score among several views of each pair."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.objectives.base import Anchors, Context, NegativeSelection, objectives
from counterfoil.objectives.triplet import HingeObjective, all_negatives_mask, hardest_negative_mask


@objectives.register("sel")
class SEL(HingeObjective):
    """SEL: hinge of the lowest-scoring view of an item against the negatives (ESA).

    K views of an image and K of its caption form a block. An image's positive is the lowest score
    among the captions of its block, a caption's the lowest among the images. Views are positives
    with equal caption ids. All positives are one block without caption ids, or if rows and columns
    are not the same pairs. Other positives are neither positive nor negative. ``hardest`` takes
    the hardest negative instead of all.
    """

    def __init__(self, *, margin: float = 0.2, hardest: bool = True) -> None:
        super().__init__(margin=margin, reduction="sum")
        self.hardest = hardest

    def anchors(
        self, scores: Tensor, positives: Tensor, context: Context
    ) -> tuple[Anchors, Anchors]:
        own, negative = positives, ~positives
        captions = context.caption_ids
        if captions is not None and scores.shape[0] == scores.shape[1]:
            own = own & (captions[:, None] == captions[None, :])
        if context.protected is not None:
            negative = negative & ~context.protected
        return worst_of_block(scores, own, negative), worst_of_block(scores.T, own.T, negative.T)

    def weights(self, anchors: Anchors, context: Context) -> Tensor:
        return hardest_negative_mask(anchors) if self.hardest else all_negatives_mask(anchors)

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        return 2 * anchors * self.margin * (1 if self.hardest else negatives)

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "hardest" if self.hardest else "all"


def worst_of_block(scores: Tensor, own: Tensor, negative: Tensor) -> Anchors:
    """One anchor per row; a row without a block has no negatives, and so no cost."""
    has_block = own.any(1, keepdim=True)
    worst = scores.masked_fill(~own & has_block, torch.inf).amin(1)
    return Anchors(worst, scores, negative & has_block)
