"""Contrastive losses with foils as extra texts of the batch: NegCLIP, and the sigmoid loss.

NegCLIP (Yuksekgonul et al. 2023): N images, N captions and their foils. Every image has the foils
of the whole batch as further negatives; captions have no foils among their candidates, since
foils have no image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.objectives.base import (
    Context,
    LossReport,
    at_least_float32,
    both_directions,
    objectives,
)
from counterfoil.objectives.contrastive import Scale, softmax_loss
from counterfoil.objectives.foils import (
    FoilBased,
    FoilMatrix,
    extra_items,
    foil_diagnostics,
    foil_matrix,
    pair_rows,
    with_foils,
)


def negclip_loss(
    scores: Tensor,
    positives: Tensor,
    context: Context,
    foils: FoilMatrix | None,
    scale: Tensor,
) -> Tensor:
    """Image → text over captions and foils, text → image over images: the mean of both."""
    by_image, by_text = both_directions(scores, positives, context)
    by_image = with_foils(by_image, foils, pair_rows(scores, positives, context))
    return (softmax_loss(by_image, scale) + softmax_loss(by_text, scale)) / 2


def pair_diagnostics(
    scores: Tensor, positives: Tensor, context: Context, foils: FoilMatrix | None
) -> dict[str, Tensor]:
    """How pairs compare with their own foils; nothing without foils or without logging."""
    if foils is None or not context.logging:
        return {}
    positive = both_directions(scores, positives)[0].positive
    own = foils.own(pair_rows(scores, positives, context))
    return foil_diagnostics(positive, own, foils.owners)


@objectives.register("negclip")
class NegCLIP(FoilBased):
    """InfoNCE with foils as extra texts: every image contrasts its caption with all foils, too.

    ``source`` is ``rules`` (or a selection: ``rules:word-swap``), a JSONL file of foils, or a run
    or pretrained model that was trained with TAGS; ``count`` foils are added per caption. A foil
    with the words of a caption of an image is not a negative of that image.
    """

    def __init__(
        self,
        *,
        source: str = "rules:word-swap",
        count: int = 1,
        temperature: float = 0.07,
        learned: bool = True,
    ) -> None:
        super().__init__(source, count)
        self.scale = Scale.of_temperature(temperature, learned)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "negclip")
        scores = at_least_float32(scores)
        scale, foils = self.scale(scores), foil_matrix(services, extra, positives)
        loss = negclip_loss(scores, positives, context, foils, scale)
        diagnostics = {"negclip/temperature": 1 / scale.detach()}
        return LossReport(loss, diagnostics | pair_diagnostics(scores, positives, context, foils))


def sigmoid_costs(
    scores: Tensor,
    positives: Tensor,
    protected: Tensor | None,
    foils: FoilMatrix | None,
    scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """SigLIP's cost of every pair, and of every image with every foil; summed over both."""
    logits = scores * scale + bias
    costs = F.softplus(torch.where(positives, -logits, logits))
    if protected is not None:
        costs = costs.masked_fill(protected & ~positives, 0)
    if foils is None:
        return costs.sum()
    of_foils = F.softplus(foils.scores.to(scores.dtype) * scale + bias)
    return costs.sum() + of_foils.masked_fill(~foils.is_negative, 0).sum()


@objectives.register("siglip-foils")
class SigLIPFoils(FoilBased):
    """SigLIP's sigmoid loss with foils as extra texts: every image with every foil is a negative.

    ``source`` and ``count`` as in `negclip`. The sum is divided by the number of captions, so that
    foils add to the loss.
    """

    def __init__(
        self,
        *,
        source: str = "rules:word-swap",
        count: int = 1,
        scale: float = 10.0,
        bias: float = -10.0,
        learned: bool = True,
    ) -> None:
        super().__init__(source, count)
        self.scale = Scale(scale, learned)
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learned)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "siglip-foils")
        scores = at_least_float32(scores)
        scale, bias = self.scale(scores), self.bias.to(scores.dtype)
        foils = foil_matrix(services, extra, positives)
        costs = sigmoid_costs(scores, positives, context.protected, foils, scale, bias)
        diagnostics = {"siglip/scale": scale.detach(), "siglip/bias": bias.detach().clone()}
        diagnostics |= pair_diagnostics(scores, positives, context, foils)
        return LossReport(costs / scores.shape[1], diagnostics)
