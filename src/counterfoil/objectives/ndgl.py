"""NDGL: a model learns the distribution of all negatives from trained models (Zhou et al. 2025).

Equation numbers are the paper's. The target Ŝ (eq. 3) is the mean score matrix of several trained
models, the guide. Margin regularization (MR, eq. 4) and hardest-negative rectification (HNR, eq. 5)
compare it with the scores S of the model in training. Eq. 6 adds the triplet loss, which is a
separate objective here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    Reduction,
    at_least_float32,
    both_directions,
    objectives,
)
from counterfoil.objectives.services import Guide, RunSetup

Direction = Literal["forward", "reverse"]

_EXCLUDED_LOGIT = -1e30
"""Logit of candidates outside a distribution; finite, so that gradients are finite as well."""


@dataclass(frozen=True)
class GuidedAnchors:
    """One direction of retrieval with the model's scores (S) and the guide's (Ŝ).

    Both have the same negatives: those for which the guide has a score, of an anchor for which it
    has one.
    """

    own: Anchors
    guide: Anchors


def guided_directions(
    scores: Tensor, targets: Tensor, positives: Tensor, context: Context | None = None
) -> tuple[GuidedAnchors, GuidedAnchors]:
    """Anchors of image → text and of text → image; pairs without a target are not negatives."""
    known = targets.isfinite()
    image_to_text, text_to_image = (
        _share_negatives(*anchors)
        for anchors in zip(
            both_directions(scores, positives, context),
            both_directions(targets.masked_fill(~known, 0.0), positives, context),
            both_directions(known, positives, context),
            strict=True,
        )
    )
    return image_to_text, text_to_image


def _share_negatives(own: Anchors, guide: Anchors, known: Anchors) -> GuidedAnchors:
    negative = own.is_negative & known.scores & known.positive[:, None]
    return GuidedAnchors(replace(own, is_negative=negative), replace(guide, is_negative=negative))


def concatenate(directions: tuple[GuidedAnchors, GuidedAnchors]) -> list[GuidedAnchors]:
    """Both directions as one if their shapes agree, which halves the kernel launches on a GPU."""
    first, second = directions
    if first.own.scores.shape != second.own.scores.shape:
        return [first, second]
    negative = torch.cat([first.own.is_negative, second.own.is_negative])
    own, guide = (
        Anchors(torch.cat([a.positive, b.positive]), torch.cat([a.scores, b.scores]), negative)
        for a, b in ((first.own, second.own), (first.guide, second.guide))
    )
    return [GuidedAnchors(own, guide)]


def margin_divergence(
    anchors: GuidedAnchors,
    temperature: float,
    target_temperature: float,
    direction: Direction = "forward",
    normalize: Literal["softmax", "sigmoid"] = "softmax",
    emphasis: Literal["hard", "easy"] = "hard",
) -> Tensor:
    """MR (eq. 4): KL [P] between an anchor's margins to its negatives and the guide's."""
    negative = anchors.own.is_negative
    if normalize == "sigmoid":
        own = _margins(anchors.own) / temperature
        guide = _margins(anchors.guide) / target_temperature
        return _bernoulli_divergence(own, guide, negative, direction)
    # the positive's score is common to all margins of an anchor, so it cancels in a softmax
    sign = 1.0 if emphasis == "hard" else -1.0
    own = anchors.own.scores * (sign / temperature)
    guide = anchors.guide.scores * (sign / target_temperature)
    return _divergence(own, guide, negative, direction)


def similarity_divergence(
    anchors: GuidedAnchors,
    temperature: float,
    target_temperature: float,
    direction: Direction = "forward",
) -> Tensor:
    """SR (the ablation): KL [P] of an anchor's similarities, its positive's included."""
    own = torch.cat([anchors.own.positive[:, None], anchors.own.scores], 1) / temperature
    guide = torch.cat([anchors.guide.positive[:, None], anchors.guide.scores], 1)
    negative = anchors.own.is_negative
    # an anchor without negatives has its positive alone: both distributions are equal
    included = torch.cat([torch.ones_like(negative[:, :1]), negative], 1)
    return _divergence(own, guide / target_temperature, included, direction)


def rectification(anchors: GuidedAnchors, gamma: float) -> tuple[Tensor, Tensor]:
    """HNR (eq. 5): cost [P] of another hardest negative than the guide's, and where both agree.

    If both have the same hardest negative, γ and the cost are 0. They also agree if the guide
    scores the two negatives equally: to the guide, two views of an item are the same.
    """
    outside = ~anchors.own.is_negative
    hardest = torch.stack(  # without negatives, both take the first candidate
        [
            side.scores.detach().masked_fill(outside, -torch.inf).argmax(1)
            for side in (anchors.own, anchors.guide)
        ],
        1,
    )
    own_hardest, guide_hardest = anchors.own.scores.gather(1, hardest).unbind(1)  # S
    target_of_own, target_max = anchors.guide.scores.gather(1, hardest).unbind(1)  # Ŝ
    agree = (hardest[:, 0] == hardest[:, 1]) | (target_of_own == target_max)
    cost = (gamma - guide_hardest + own_hardest).clamp(min=0)  # eq. 5
    return cost.masked_fill(agree, 0.0), agree


def _margins(anchors: Anchors) -> Tensor:
    return anchors.positive[:, None] - anchors.scores


def _divergence(own: Tensor, guide: Tensor, mask: Tensor, direction: Direction) -> Tensor:
    """KL [P] of two distributions over the entries inside ``mask`` of each row, given as logits."""
    outside = ~mask
    log_p, log_q = (F.log_softmax(x.masked_fill(outside, _EXCLUDED_LOGIT), 1) for x in (own, guide))
    if direction == "reverse":
        log_p, log_q = log_q, log_p
    # excluded entries have probability 0; with an empty mask both distributions are uniform
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _bernoulli_divergence(own: Tensor, guide: Tensor, mask: Tensor, direction: Direction) -> Tensor:
    """Mean [P] over the entries inside ``mask`` of the KL of Bernoulli distributions."""
    p, q = (own, guide) if direction == "forward" else (guide, own)
    yes = p.sigmoid() * (F.logsigmoid(p) - F.logsigmoid(q))
    no = (-p).sigmoid() * (F.logsigmoid(-p) - F.logsigmoid(-q))
    return (yes + no).masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


@objectives.register("ndgl")
class NDGL(Objective):
    """NDGL: margins to all negatives follow those of a guide; added to another loss.

    ``guide``: a folder that ``counterfoil guide build`` made from trained runs. The loss is
    ``mr`` · MR + ``hnr`` · HNR + ``sr`` · SR. Add the triplet loss of eq. 6 as another term:
    ``{hardest: {}, ndgl: {guide: …}}``.

    MR (eq. 4) is KL(S ‖ Ŝ) of an anchor's margins S(i, t) − S(i, t̄), or KL(Ŝ ‖ S) with
    ``direction="reverse"``. The paper does not say how margins become a distribution.
    ``normalize="softmax"``: over the anchor's true negatives, at ``temperature`` (the guide's at
    ``target_temperature``). The positive's score cancels in a softmax, so that distributions over
    negatives are compared; harder negatives are more probable. ``emphasis="easy"`` uses the sign as
    printed, which makes easier negatives more probable. ``normalize="sigmoid"``: a margin is the
    log-odds that the positive wins, which keeps the positive's score; mean over negatives.

    MR and SR are means over anchors, summed over both directions; ``reduction`` applies to HNR, as
    to the triplet loss. A softmax at temperature T makes the KL about 1 / T² times as large. A mean
    over anchors at T = 0.1 therefore weighs as much as the printed sum over a batch of about 100 at
    T = 1: ``mr=100`` is meant for either.
    """

    requires = "the scores of a guide (counterfoil guide build)"

    def __init__(
        self,
        *,
        guide: str = "",
        mr: float = 100.0,
        hnr: float = 0.5,
        sr: float = 0.0,
        gamma: float = 0.01,
        temperature: float = 0.1,
        target_temperature: float | None = None,
        normalize: Literal["softmax", "sigmoid"] = "softmax",
        emphasis: Literal["hard", "easy"] = "hard",
        direction: Direction = "forward",
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__()
        if not guide:
            raise ConfigError(
                "objective.ndgl: no guide given; build one from trained runs with: counterfoil "
                "guide build runs/a runs/b --out guides/ab, then set objective.ndgl.guide=guides/ab"
            )
        target = temperature if target_temperature is None else target_temperature
        self._require_positive(temperature=temperature, target_temperature=target)
        self._require_nonnegative(mr=mr, hnr=hnr, sr=sr, gamma=gamma)
        self.folder, self.mr, self.hnr, self.sr, self.gamma = guide, mr, hnr, sr, gamma
        self.temperature, self.target_temperature = temperature, target
        self.normalize, self.emphasis, self.direction = normalize, emphasis, direction
        self.reduction = reduction
        self.guide: Guide | None = None

    def prepare(self, training: RunSetup) -> None:
        self.guide = training.guide(self.folder)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        if self.guide is None or context.image_ids is None or context.caption_ids is None:
            raise TrainingError("objective.ndgl works on the batches of a training run only")
        targets = self.guide.scores(context.image_ids, context.caption_ids, scores.device)
        return self.compare(scores, targets, positives, context)

    def compare(
        self, scores: Tensor, targets: Tensor, positives: Tensor, context: Context
    ) -> LossReport:
        """The loss of scores S against targets Ŝ, both [n_images, n_texts]."""
        scores = at_least_float32(scores)
        guided = guided_directions(scores, targets.to(scores.dtype), positives, context)
        directions = concatenate(guided)
        options = (self.temperature, self.target_temperature, self.direction)
        mr = _sum_of_means(  # eq. 4
            [margin_divergence(a, *options, self.normalize, self.emphasis) for a in directions]
        )
        costs, agreements = zip(*(rectification(a, self.gamma) for a in directions), strict=True)
        hnr = torch.cat(costs).sum() if self.reduction == "sum" else _sum_of_means(costs) / 2
        loss = self.mr * mr + self.hnr * hnr  # eq. 6 without the triplet loss
        if self.sr:
            sr = _sum_of_means([similarity_divergence(a, *options) for a in directions])
            loss = loss + self.sr * sr
        if not context.logging:
            return LossReport(loss)
        has_negatives = torch.cat([anchors.own.is_negative.any(1) for anchors in directions])
        agree = torch.cat(agreements) & has_negatives
        diagnostics = {
            "ndgl/mr": mr.detach(),
            "ndgl/hnr": hnr.detach(),
            "ndgl/agreement": agree.sum() / has_negatives.sum().clamp(min=1),
        }
        return LossReport(loss, diagnostics)


def _sum_of_means(costs: Sequence[Tensor]) -> Tensor:
    """The means of both directions, summed; both have the same number of anchors."""
    return 2 * torch.cat(tuple(costs)).mean()
