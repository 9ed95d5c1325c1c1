"""NDGL: the distribution of all negatives, as trained models see it, guides a new one."""

from __future__ import annotations

from dataclasses import dataclass
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
    both_directions,
    objectives,
)
from counterfoil.objectives.contrastive import at_least_float32
from counterfoil.objectives.services import Guide, RunSetup

Direction = Literal["forward", "reverse"]

_EXCLUDED_LOGIT = -1e30
"""The logit of what is no part of a distribution; finite, so that gradients stay so, too."""


@dataclass(frozen=True)
class GuidedAnchors:
    """One direction of retrieval as the model scores it (S) and as its guide does (Ŝ).

    The negatives of both are the same: those whose scores, and whose anchor's, the guide knows.
    """

    own: Anchors
    guide: Anchors


def guided_directions(
    scores: Tensor, targets: Tensor, positives: Tensor, context: Context | None = None
) -> tuple[GuidedAnchors, GuidedAnchors]:
    """Anchors of image → text and of text → image; what the guide does not know is no negative."""
    known = targets.isfinite()
    own = both_directions(scores, positives, context)
    guide = both_directions(targets.masked_fill(~known, 0.0), positives, context)
    seen = both_directions(known, positives)
    image_to_text, text_to_image = (
        _guided(mine, theirs, there.positive, there.scores)
        for mine, theirs, there in zip(own, guide, seen, strict=True)
    )
    return image_to_text, text_to_image


def _guided(own: Anchors, guide: Anchors, positive: Tensor, candidates: Tensor) -> GuidedAnchors:
    negative = own.is_negative & candidates & positive[:, None]
    return GuidedAnchors(
        Anchors(own.positive, own.scores, negative),
        Anchors(guide.positive, guide.scores, negative),
    )


def together(directions: tuple[GuidedAnchors, GuidedAnchors]) -> list[GuidedAnchors]:
    """Anchors of both directions as one, which halves the launches on a GPU, where sizes agree."""
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
    """Divergence [P] of an anchor's margins to its negatives from the guide's (Eq. 4)."""
    negative = anchors.own.is_negative
    if normalize == "sigmoid":
        own = _margins(anchors.own) / temperature
        guide = _margins(anchors.guide) / target_temperature
        return _bernoulli_divergence(own, guide, negative, direction)
    # a softmax does not see the positive's score, which all margins of an anchor share
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
    """Divergence [P] of an anchor's similarities, its positive's among them (SR, the ablation)."""
    negative = anchors.own.is_negative
    own = torch.cat([anchors.own.positive[:, None], anchors.own.scores], 1) / temperature
    guide = torch.cat([anchors.guide.positive[:, None], anchors.guide.scores], 1)
    compared = torch.ones_like(negative[:, :1])  # by itself, a certainty for both
    return _divergence(
        own, guide / target_temperature, torch.cat([compared, negative], 1), direction
    )


def rectification(anchors: GuidedAnchors, gamma: float) -> tuple[Tensor, Tensor]:
    """Cost [P] of ranking another negative above the guide's hardest, and where both agree (Eq. 5).

    Where both choose the same negative γ is 0, and so is the cost. They also agree where the guide
    scores the model's choice as high as its own: two views of an item are one to the guide.
    """
    outside = ~anchors.own.is_negative
    choices = torch.stack(
        [
            side.scores.detach().masked_fill(outside, -torch.inf).argmax(1)
            for side in (anchors.own, anchors.guide)
        ],
        1,
    )  # the model's and the guide's; without negatives, both choose the first
    chosen, better = anchors.own.scores.gather(1, choices).unbind(1)
    chosen_there, hardest = anchors.guide.scores.gather(1, choices).unbind(1)
    agree = (choices[:, 0] == choices[:, 1]) | (chosen_there == hardest)
    cost = (gamma - better + chosen).clamp(min=0)
    return cost.masked_fill(agree, 0.0), agree


def _margins(anchors: Anchors) -> Tensor:
    return anchors.positive[:, None] - anchors.scores


def _divergence(own: Tensor, guide: Tensor, part: Tensor, direction: Direction) -> Tensor:
    """KL [P] of two distributions over the ``part`` of each row, given as logits."""
    outside = ~part
    log_p, log_q = (F.log_softmax(x.masked_fill(outside, _EXCLUDED_LOGIT), 1) for x in (own, guide))
    if direction == "reverse":
        log_p, log_q = log_q, log_p
    # outside, what is likely by neither adds nothing; where there is no part, both are the same
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _bernoulli_divergence(own: Tensor, guide: Tensor, part: Tensor, direction: Direction) -> Tensor:
    """Mean over the ``part`` of each row [P] of the KL of yes-or-no distributions."""
    p, q = (own, guide) if direction == "forward" else (guide, own)
    yes = p.sigmoid() * (F.logsigmoid(p) - F.logsigmoid(q))
    no = (-p).sigmoid() * (F.logsigmoid(-p) - F.logsigmoid(-q))
    return (yes + no).masked_fill(~part, 0.0).sum(1) / part.sum(1).clamp(min=1)


@objectives.register("ndgl")
class NDGL(Objective):
    """NDGL: margins to all negatives as a guide has them, beside another loss (Zhou et al. 2025).

    ``guide`` is a folder that ``counterfoil guide build`` made of trained runs. The loss is
    ``mr`` · MR + ``hnr`` · HNR + ``sr`` · SR; the triplet loss of Eq. 6 is a term of its own:
    ``{hardest: {}, ndgl: {guide: …}}``.

    MR (Eq. 4) is KL(S ‖ Ŝ) of an anchor's margins S(i, t) - S(i, t̄). The paper does not say how
    margins become a distribution. ``normalise="softmax"``: over the anchor's true negatives, at
    ``temperature`` (the guide's at ``target_temperature``). A softmax does not see what is added to
    all its entries, so the positive's score cancels and what is compared is the distribution over
    negatives: the harder, the more probable (``emphasis="easy"`` takes the margins with their sign
    as printed, the easier the more probable). ``"sigmoid"``: each margin is the odds that the
    positive wins, which keeps the positive's score; mean over negatives. MR and SR are means over
    anchors, both directions added; HNR is summed over anchors as the triplet loss is
    (``reduction``). ``direction="reverse"`` is KL(Ŝ ‖ S).

    A softmax at temperature T makes KL about 1 / T² as large, so a mean over anchors at 0.1 weighs
    as the printed sum over a batch of about 100 at 1 does: ``mr=100`` is meant for either.
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
                "objective.ndgl: a guide says how hard each negative is; make one of trained runs "
                "with: counterfoil guide build runs/a runs/b --out guides/ab, then name it: "
                "objective.ndgl.guide=guides/ab"
            )
        target = temperature if target_temperature is None else target_temperature
        for name, value in {"temperature": temperature, "target_temperature": target}.items():
            if value <= 0:
                raise ConfigError(f"objective.ndgl.{name}: more than 0, got {value}")
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
        directions = together(
            guided_directions(scores, targets.to(scores.dtype), positives, context)
        )
        mr = self._both([self._margin_divergence(anchors) for anchors in directions])
        costs = [rectification(anchors, self.gamma) for anchors in directions]
        hnr = self._reduced([cost for cost, _ in costs])
        loss = self.mr * mr + self.hnr * hnr
        if self.sr:
            loss = loss + self.sr * self._both(
                [self._similarity_divergence(anchors) for anchors in directions]
            )
        if not context.logging:
            return LossReport(loss)
        asked = torch.cat([anchors.own.is_negative.any(1) for anchors in directions])
        agree = torch.cat([same for _, same in costs]) & asked
        return LossReport(
            loss,
            {
                "ndgl/mr": mr.detach(),
                "ndgl/hnr": hnr.detach(),
                "ndgl/agreement": agree.sum() / asked.sum().clamp(min=1),
            },
        )

    def _margin_divergence(self, anchors: GuidedAnchors) -> Tensor:
        return margin_divergence(
            anchors,
            self.temperature,
            self.target_temperature,
            self.direction,
            self.normalize,
            self.emphasis,
        )

    def _similarity_divergence(self, anchors: GuidedAnchors) -> Tensor:
        return similarity_divergence(
            anchors, self.temperature, self.target_temperature, self.direction
        )

    def _reduced(self, costs: list[Tensor]) -> Tensor:
        """Both directions, as the triplet losses reduce theirs."""
        if self.reduction == "sum":
            return torch.cat(costs).sum()
        return self._both(costs) / 2

    @staticmethod
    def _both(costs: list[Tensor]) -> Tensor:
        """The means of both directions, added."""
        return 2 * torch.cat(costs).mean()
