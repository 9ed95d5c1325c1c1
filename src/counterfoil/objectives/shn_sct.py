"""SHN and SCT: semi-hard and selectively contrastive negatives, for scores above the positive."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from counterfoil.core.registry import refuse_unused
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    Reduction,
    both_directions,
    objectives,
)

Form = Literal["paper", "reference"]


class MinedNegative(Objective):
    """A cost for one mined negative per anchor.

    ``form="paper"`` uses the hinge of SelHN's appendix B.2, summed over anchors and directions.
    ``form="reference"`` uses the public code of SCT: the NCA cost
    −log softmax([positive, negative] / temperature), averaged over the anchors with a negative.
    That code mines among images of the same and of other classes; here each pair is a class.
    ``reduction`` overrides that of the form; ``"mean"`` in the paper's form averages over all
    anchors, as in `hardest`. Options that a form does not read raise an error.
    """

    name: str

    def __init__(
        self,
        *,
        margin: float = 0.2,
        form: Form = "paper",
        temperature: float = 0.1,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        unused = {"temperature": temperature} if form == "paper" else {"margin": margin}
        refuse_unused(type(self), f"objective.{self.name}", f"form={form}", **unused)
        self._require_nonnegative(margin=margin)
        self._require_positive(temperature=temperature)
        self.margin, self.form, self.temperature = margin, form, temperature
        self.reduction = reduction or ("sum" if form == "paper" else "mean")

    def allowed(self, anchors: Anchors) -> Tensor:
        """Mask [P, C] of the candidates that may be mined."""
        raise NotImplementedError

    def costs(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Cost of each positive and its mined negative, all [P]."""
        if self.form == "paper":
            return (self.margin + negative - positive).clamp(min=0)
        return F.softplus((negative - positive) / self.temperature)

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin if self.form == "paper" else None

    def loss(self, *directions: Anchors) -> Tensor:
        costs, valid = map(torch.cat, zip(*map(self._one_direction, directions), strict=True))
        if self.reduction == "sum":
            return costs.sum()
        return costs.mean() if self.form == "paper" else costs.sum() / valid.sum().clamp(min=1)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        directions = both_directions(scores, positives, context)
        return LossReport(self.loss(*directions))

    def _one_direction(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Costs [P], and a mask [P] of the anchors with a negative; the others cost nothing."""
        allowed = self.allowed(anchors)
        ranked = anchors.scores.detach().masked_fill(~allowed, -torch.inf)
        negative = anchors.scores.gather(1, ranked.argmax(1, keepdim=True)).squeeze(1)
        valid = allowed.any(1)
        return self.costs(anchors.positive, negative).masked_fill(~valid, 0), valid


@objectives.register("shn")
class SHN(MinedNegative):
    """SHN: hinge on the semi-hard negative, the hardest below the positive (SelHN eq. 13-14).

    Equal scores cost nothing, so that a collapsed model has the loss of a perfect one.
    """

    name = "shn"

    def allowed(self, anchors: Anchors) -> Tensor:
        return anchors.is_negative & (anchors.scores < anchors.positive[:, None])


@objectives.register("sct")
class SCT(MinedNegative):
    """SCT: hinge on the hardest negative, or its score if above the positive (SelHN eq. 15-16).

    ``lam`` is the weight of the second case. In the reference form, a negative above
    ``hard_similarity`` is hard as well, regardless of the positive.
    """

    name = "sct"

    def __init__(
        self,
        *,
        margin: float = 0.2,
        lam: float = 1.0,
        form: Form = "paper",
        temperature: float = 0.1,
        hard_similarity: float = 0.8,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(margin=margin, form=form, temperature=temperature, reduction=reduction)
        if form == "paper":
            kind = SCT
            refuse_unused(kind, "objective.sct", "form=paper", hard_similarity=hard_similarity)
        self._require_nonnegative(lam=lam)
        self.lam, self.hard_similarity = lam, hard_similarity

    def allowed(self, anchors: Anchors) -> Tensor:
        return anchors.is_negative

    def costs(self, positive: Tensor, negative: Tensor) -> Tensor:
        if self.form == "paper":
            hard = negative >= positive
        else:
            hard = (negative > positive) | (negative > self.hard_similarity)
        return torch.where(hard, self.lam * negative, super().costs(positive, negative))
