"""FSC-CLIP: foils with local similarities and selective calibration (Oh et al. 2024).

The plain contrastive loss, and a classification of the caption among its own foils: once by the
scores of the model, once by local similarities of words and regions. Both are calibrated: focal
weights reduce the loss of foils that score below the caption already, and smoothed labels leave
some probability to the foils, since a foil may happen to be true.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.distributed import gather_rows
from counterfoil.core.errors import ConfigError
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.objectives.base import (
    Context,
    LossReport,
    at_least_float32,
    both_directions,
    objectives,
)
from counterfoil.objectives.contrastive import Scale, softmax_loss
from counterfoil.objectives.foils import (
    NO_OWNER,
    FoilBased,
    FoilMatrix,
    extra_items,
    foil_matrix,
    pair_images,
    pair_rows,
)
from counterfoil.objectives.negclip import pair_diagnostics
from counterfoil.objectives.services import BatchServices

_OUTSIDE = -1e30


def calibrated_loss(
    positive: Tensor, foils: Tensor, owners: Tensor, focus: float, smoothing: float
) -> Tensor:
    """Focal loss with smoothed labels of each caption among its own foils; mean over such pairs.

    ``positive`` [P] and ``foils`` [F] are logits. With k foils, the label of the caption is
    1 − β + β / (k + 1), that of each foil β / (k + 1). The cost of a class is
    −(1 − p)^γ · log p, with γ the ``focus`` and β the ``smoothing``.
    """
    count = torch.bincount(owners, minlength=len(positive))
    pairs = count.nonzero()[:, 0]
    width = int(count.max())
    # the foils of a pair are consecutive
    offset = torch.arange(len(owners), device=owners.device) - (count.cumsum(0) - count)[owners]
    table = positive.new_full((len(positive), width), _OUTSIDE).index_put((owners, offset), foils)
    logits = torch.cat([positive[:, None], table], 1)[pairs]
    real = torch.arange(width + 1, device=owners.device) <= count[pairs, None]
    share = smoothing / (count[pairs, None] + 1).to(logits.dtype)
    labels = share * real
    labels[:, 0] += 1 - smoothing
    log_p = F.log_softmax(logits, 1).masked_fill(~real, 0.0)
    missing = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
    return -(labels * missing**focus * log_p).sum(1).mean()


def local_scores(images: Encoded, texts: Encoded, scale: Tensor) -> Tensor:
    """Local logits [n] of image ``k`` with text ``k``: logsumexp over words of scaled cosines.

    A word is compared with the mean of the regions, weighted by its similarities with them. The
    weights are scaled to 0…1 over the regions, sum to 1, and have no gradient.
    """
    regions, words = images.fragments, texts.fragments
    assert regions is not None  # noqa: S101 - the objective needs fragments of both sides
    assert words is not None  # noqa: S101
    regions, words = at_least_float32(regions), l2_normalize(at_least_float32(words))
    with torch.no_grad():
        similar = words @ regions.transpose(1, 2)
        outside = ~images.mask[:, None]
        low = similar.masked_fill(outside, torch.inf).amin(2, keepdim=True)
        weights = (similar - low).masked_fill(outside, 0.0)
        # equal similarities (also a single region) give equal weights
        weights = torch.where(weights.amax(2, keepdim=True) > 0, weights, (~outside).to(low.dtype))
        weights = weights / weights.sum(2, keepdim=True)
    attended = l2_normalize(weights @ regions)
    logits = (attended * words).sum(2) * scale
    return logits.masked_fill(~texts.mask, -torch.inf).logsumexp(1)


@objectives.register("fsc-clip")
class FSCCLIP(FoilBased):
    """FSC-CLIP: InfoNCE + ``whole`` · calibrated loss of scores + ``local`` · that of words.

    A caption is classified among its own foils; ``focus`` is the exponent γ of the focal loss,
    ``smoothing`` the share β of the label that the classes have in common. With ``local=0`` the
    model needs no words and regions. ``source`` and ``count`` as in `negclip`.
    """

    def __init__(
        self,
        *,
        source: str = "rules",
        count: int = 2,
        temperature: float = 0.07,
        learned: bool = True,
        whole: float = 0.5,
        local: float = 0.2,
        focus: float = 2.0,
        smoothing: float = 0.02,
    ) -> None:
        super().__init__(source, count)
        if focus < 0 or not 0 <= smoothing < 1:
            raise ConfigError(
                "objective.fsc-clip: focus must be at least 0, smoothing in 0…1 (below 1); got "
                f"{focus} and {smoothing}"
            )
        self._require_nonnegative(whole=whole, local=local)
        self.whole, self.local, self.focus, self.smoothing = whole, local, focus, smoothing
        self.needs = "both" if local else None
        self.scale = Scale.of_temperature(temperature, learned)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "fsc-clip")
        scores = at_least_float32(scores)
        scale, foils = self.scale(scores), foil_matrix(services, extra, positives, self.needs)
        directions = both_directions(scores, positives, context)
        loss = (softmax_loss(directions[0], scale) + softmax_loss(directions[1], scale)) / 2
        if foils is None:
            return LossReport(loss)
        own = foils.own(pair_rows(scores, positives, context)).to(scores.dtype)
        options = (foils.owners, self.focus, self.smoothing)
        whole = calibrated_loss(directions[0].positive * scale, own * scale, *options)
        diagnostics = {"fsc-clip/whole": whole.detach()}
        loss = loss + self.whole * whole
        if self.local:
            pairs, of_foils = _local(services, foils, scale)
            local = calibrated_loss(pairs, of_foils, *options)
            diagnostics["fsc-clip/local"] = local.detach()
            loss = loss + self.local * local
        return LossReport(loss, diagnostics | pair_diagnostics(scores, positives, context, foils))


def _local(services: BatchServices, foils: FoilMatrix, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Local logits of the pairs and of the foils of all processes."""
    for side, encoded in (("image", services.images), ("text", services.texts)):
        if encoded.fragments is None:
            raise ConfigError(
                f"objective.fsc-clip: the {side} encoder has no fragments to compare; set "
                "objective.fsc-clip.local=0, or use a model with regions and words"
            )
    images = services.images[pair_images(services.batch)]
    owners = foils.local_owners
    with services.autocast():
        pairs = local_scores(images, services.texts, scale)
        own = local_scores(images[owners.clamp(min=0)], foils.encoded, scale)
    real = gather_rows(owners) != NO_OWNER
    return gather_rows(pairs), gather_rows(own)[real]
