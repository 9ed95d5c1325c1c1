"""Contrastive losses with a learned temperature: InfoNCE (CLIP, CHAN) and SigLIP."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    at_least_float32,
    both_directions,
    objectives,
)

MAX_SCALE = 100.0


class Scale(nn.Module):
    """The factor of the scores: constant, or learned as its logarithm and clamped to 100."""

    def __init__(self, initial: float, learned: bool) -> None:
        super().__init__()
        if not 0 < initial < math.inf or (learned and initial > MAX_SCALE * (1 + 1e-9)):
            bound = f" and at most {MAX_SCALE:g} if it is learned" if learned else ""
            raise ConfigError(
                f"objective: the scale of the scores (1 / temperature) must be above 0{bound}, "
                f"got {initial:g}; set another temperature or scale"
            )
        self.constant = initial
        self.log: nn.Parameter | None = (
            nn.Parameter(torch.tensor(math.log(initial))) if learned else None
        )

    @classmethod
    def of_temperature(cls, temperature: float, learned: bool) -> Scale:
        return cls(1 / temperature if temperature else math.inf, learned)

    def forward(self, scores: Tensor) -> Tensor:
        if self.log is None:
            return scores.new_tensor(self.constant)
        with torch.no_grad():  # a clamp inside the graph would have no gradient at the bound
            self.log.clamp_(max=math.log(MAX_SCALE))
        return self.log.to(scores.dtype).exp()


@objectives.register("infonce")
class InfoNCE(Objective):
    """Softmax cross-entropy over the batch in both directions, with a learned temperature (CLIP).

    log(1 + Σ exp((negative − positive + margin) / temperature)) per anchor, averaged over anchors.
    The sum excludes other positives of the anchor and protected pairs. ``form="clip"`` averages
    the two directions, ``"chan"`` adds them, as CHAN's code does.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        learned: bool = True,
        margin: float = 0.0,
        form: Literal["clip", "chan"] = "clip",
    ) -> None:
        super().__init__()
        self.margin, self.form = margin, form
        self.scale = Scale.of_temperature(temperature, learned)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        scores = at_least_float32(scores)
        scale = self.scale(scores)
        directions = both_directions(scores, positives, context)
        losses = [softmax_loss(anchors, scale, self.margin) for anchors in directions]
        loss = losses[0] + losses[1]
        diagnostics = {"infonce/temperature": 1 / scale.detach()}
        return LossReport(loss / 2 if self.form == "clip" else loss, diagnostics)

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        scale = self.scale.constant if self.scale.log is None else self.scale.log.exp().item()
        if negatives == 0:
            return 0.0
        exponent = math.log(negatives) + self.margin * scale
        loss = max(exponent, 0.0) + math.log1p(math.exp(-abs(exponent)))
        return loss if self.form == "clip" else 2 * loss


def softmax_loss(anchors: Anchors, scale: Tensor, margin: float = 0.0) -> Tensor:
    """Mean cross-entropy of one direction: each positive against its negatives."""
    gaps = (anchors.scores - anchors.positive[:, None] + margin) * scale
    own = torch.zeros_like(gaps[:, :1])  # the positive, without the margin
    logits = torch.cat([own, gaps.masked_fill(~anchors.is_negative, -torch.inf)], 1)
    return logits.logsumexp(1).mean()


@objectives.register("siglip")
class SigLIP(Objective):
    """Sigmoid loss on every pair of the batch, with learned scale and bias (SigLIP).

    All pairs of one image are positives; protected pairs have no cost. The sum is divided by the
    number of texts, which is the batch size in a batch of pairs.
    """

    def __init__(self, *, scale: float = 10.0, bias: float = -10.0, learned: bool = True) -> None:
        super().__init__()
        self.scale = Scale(scale, learned)
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learned)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        scores = at_least_float32(scores)
        scale = self.scale(scores)
        logits = scores * scale + self.bias.to(scores.dtype)
        costs = F.softplus(torch.where(positives, -logits, logits))
        if context.protected is not None:
            costs = costs.masked_fill(context.protected & ~positives, 0)
        diagnostics = {"siglip/scale": scale.detach(), "siglip/bias": self.bias.detach().clone()}
        return LossReport(costs.sum() / scores.shape[1], diagnostics)
