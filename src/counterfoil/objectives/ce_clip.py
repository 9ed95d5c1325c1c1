"""CE-CLIP: foils contrasted within the text side, and ranked below the caption (Zhang et al. 2024).

Three terms: the contrastive loss with foils as extra texts (`negclip`), an intra-modal contrast of
a caption with its foils, and a cross-modal rank loss, whose threshold grows with the gap that the
model has reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_rows
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.objectives.base import (
    Context,
    LossReport,
    at_least_float32,
    both_directions,
    objectives,
)
from counterfoil.objectives.contrastive import Scale
from counterfoil.objectives.foils import (
    NO_OWNER,
    FoilBased,
    FoilMatrix,
    add_in_order,
    extra_items,
    foil_matrix,
    pair_rows,
)
from counterfoil.objectives.negclip import negclip_loss, pair_diagnostics
from counterfoil.objectives.services import BatchServices


def intra_modal_loss(
    positive: Tensor, similarities: Tensor, owners: Tensor, scale: Tensor
) -> Tensor:
    """Mean of −log(exp(s(I, T)) / (exp(s(I, T)) + Σ exp(s(T, T⁻)))) over pairs with foils.

    ``positive`` [P] are the scores of pairs, ``similarities`` [F] those of captions and their
    foils, both times ``scale`` inside the exponentials.
    """
    logits = (similarities - positive[owners]) * scale
    # logsumexp per pair over a ragged set: shifted by its maximum, which is at least 0
    highest = torch.zeros_like(positive).scatter_reduce(0, owners, logits.detach(), "amax")
    terms = (logits - highest[owners]).exp()
    total = add_in_order((-highest).exp(), owners, terms)
    losses = highest + total.log()
    has_foils = torch.zeros_like(positive).index_fill(0, owners, 1.0)
    return (losses * has_foils).sum() / has_foils.sum().clamp(min=1)


def rank_loss(
    positive: Tensor, foils: Tensor, owners: Tensor, scale: Tensor, threshold: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean of max(0, threshold − gap) over foils, and the mean gap, which is the next threshold.

    A gap is (s(I, T) − s(I, T⁻)) times ``scale``.
    """
    gaps = (positive[owners] - foils) * scale
    return (threshold - gaps).clamp(min=0).mean(), gaps.detach().mean()


def text_vectors(texts: Encoded) -> Tensor:
    """One unit vector [n, D] per text: the pooled one, or the mean of its words."""
    if texts.pooled is not None:
        return l2_normalize(texts.pooled)
    assert texts.fragments is not None  # noqa: S101 - a matcher reads one of the two
    return l2_normalize((texts.fragments * texts.mask[..., None]).sum(1))


@objectives.register("ce-clip")
class CECLIP(FoilBased):
    """CE-CLIP: NegCLIP's loss + ``intra`` · intra-modal contrast + ``rank`` · rank loss.

    The rank loss wants the gap between a caption and its foil, in units of the scaled scores, to
    reach a threshold: the mean gap of the former step, at most ``max_threshold`` (0 at first).
    ``source`` and ``count`` as in `negclip`.
    """

    threshold: Tensor

    def __init__(
        self,
        *,
        source: str = "rules",
        count: int = 2,
        temperature: float = 0.07,
        learned: bool = True,
        intra: float = 0.2,
        rank: float = 0.4,
        max_threshold: float = 10.0,
    ) -> None:
        super().__init__(source, count)
        self._require_nonnegative(intra=intra, rank=rank, max_threshold=max_threshold)
        self.intra, self.rank, self.max_threshold = intra, rank, max_threshold
        self.scale = Scale.of_temperature(temperature, learned)
        self.register_buffer("threshold", torch.zeros(()))

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "ce-clip")
        scores = at_least_float32(scores)
        scale, foils = self.scale(scores), foil_matrix(services, extra, positives)
        loss = negclip_loss(scores, positives, context, foils, scale)
        if foils is None:
            return LossReport(loss)
        positive = both_directions(scores, positives)[0].positive
        intra = intra_modal_loss(positive, _to_captions(services, foils), foils.owners, scale)
        own = foils.own(pair_rows(scores, positives, context)).to(scores.dtype)
        threshold = self.threshold.to(scores.dtype)
        rank, gap = rank_loss(positive, own, foils.owners, scale, threshold)
        with torch.no_grad():
            self.threshold.copy_(gap.clamp(max=self.max_threshold))
        diagnostics = {
            "ce-clip/intra": intra.detach(),
            "ce-clip/rank": rank.detach(),
            "ce-clip/threshold": threshold.clone(),
            **pair_diagnostics(scores, positives, context, foils),
        }
        return LossReport(loss + self.intra * intra + self.rank * rank, diagnostics)


def _to_captions(services: BatchServices, foils: FoilMatrix) -> Tensor:
    """Similarities [F] of the foils of all processes with their captions."""
    owners = foils.local_owners
    captions = text_vectors(services.texts)[owners.clamp(min=0)]
    with services.autocast():
        similarities = (captions * text_vectors(foils.encoded)).sum(1)
    real = gather_rows(owners) != NO_OWNER
    return at_least_float32(gather_rows(similarities))[real]
