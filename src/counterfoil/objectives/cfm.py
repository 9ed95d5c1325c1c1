"""CFM: counterfactual negatives, made by changing the most important regions and words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_rows, own_slice
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.objectives.base import Context, LossReport, batch_generator, objectives
from counterfoil.objectives.cfm_perturbations import ImageSide, Side, TextSide, Tokens
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.services import BatchServices, RunSetup
from counterfoil.objectives.triplet import HardestNegative


def counterfactual_loss(
    positive: Tensor, negative: Tensor, margin: float, counted: Tensor | None = None
) -> Tensor:
    """Σ [margin + negative − positive]₊ over the ``counted`` triplets."""
    costs = (margin + negative - positive).clamp(min=0)
    return costs.sum() if counted is None else (costs * counted).sum()


@dataclass(frozen=True)
class HardTriplets:
    """Anchors of one direction that violate the margin.

    ``anchor`` are rows of this process's share, ``positive`` and ``negative`` of the global batch.
    ``score`` is that of each anchor with its positive. If no anchor violates the margin, one
    triplet is kept with ``counted=False``, so that every process runs the same operations.
    """

    anchor: Tensor
    positive: Tensor
    negative: Tensor
    score: Tensor
    counted: Tensor

    @staticmethod
    def of(
        scores: Tensor, negatives: Tensor, anchor: Tensor, positive: Tensor, margin: float
    ) -> HardTriplets:
        """From scores and true negatives [anchors, candidates] and the pairs among them."""
        score = scores[anchor, positive]
        ranked = scores.detach()[anchor].masked_fill(~negatives[anchor], -torch.inf)
        hardest, negative = ranked.max(1)
        active = margin + hardest - score.detach() > 0
        rows = active.nonzero().flatten()
        if not len(rows):
            rows = rows.new_zeros(1)
        return HardTriplets(anchor[rows], positive[rows], negative[rows], score[rows], active[rows])


@objectives.register("cfm")
class CFM(HardestNegative):
    """Hardest negatives, and counterfactual negatives made from their important parts (CFM).

    In triplets that violate the margin, the importance of a region or word is the norm of the
    gradient of s(anchor, positive) − s(anchor, negative) with respect to it. Self-adjustment makes
    a harder negative from the positive, in a share ``adjust`` of the batches: the most important
    ``exchange_regions`` or ``exchange_words`` of it are replaced by those of the hard negative.
    Self-exploration masks the most important ``mask_regions`` (by the mean of the rest) or
    ``mask_words`` (by the mask token) of positive and negative, in a share ``explore``. Both add a
    hinge with ``margin2`` against the original anchors.

    The gradient is that of a word's occurrence, as in the paper; the public code takes that of its
    row in the embedding table, a sum over the batch. Shares are rounded down, but at least one
    position changes. Start, end and padding are never changed, unlike in the public code. Several
    processes divide the anchors among them; negatives are those of the global batch.
    """

    requires = "the fragments and words of the batch, and the model that scores them"

    def __init__(
        self,
        *,
        margin: float = 0.2,
        margin2: float = 0.1,
        warmup_epochs: int = 0,
        adjust: float = 0.33,
        explore: float = 0.33,
        exchange_regions: float = 0.8,
        exchange_words: float = 0.8,
        mask_regions: float = 0.1,
        mask_words: float = 0.1,
    ) -> None:
        super().__init__(margin=margin, warmup_epochs=warmup_epochs)
        self._require_nonnegative(margin2=margin2)
        self.margin2, self.chances = margin2, {"adjust": adjust, "explore": explore}
        self.shares = {
            "exchange_regions": exchange_regions,
            "exchange_words": exchange_words,
            "mask_regions": mask_regions,
            "mask_words": mask_words,
        }
        for name, value in {**self.chances, **self.shares}.items():
            if not 0 <= value <= 1 or (name in self.shares and not value):
                raise ConfigError(f"objective.cfm.{name}: expected a share up to 1, got {value}")
        self.tokens: Tokens | None = None
        self.seed = 0

    def prepare(self, training: RunSetup) -> None:
        self.tokens, self.seed = Tokens.of(training.text), training.seed

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, tokens = context.services, self.tokens
        if services is None or tokens is None:
            raise TrainingError(
                "objective 'cfm' makes its negatives from the batch and the model of a training "
                "run: call prepare() first, and give it a context with both"
            )
        report = super().compute(scores, positives, context)
        adjusts, explores = self._draw(context)
        if not adjusts and not explores:
            return report
        loss, diagnostics = report.loss, dict(report.diagnostics)
        for side, triplets in self._directions(scores, positives, context, services, tokens):
            losses = self._counterfactual_losses(side, triplets, adjusts, explores)
            for name, value in losses.items():
                loss = loss + value
                if context.logging:
                    diagnostics[name] = diagnostics.get(name, 0) + value.detach()
        return LossReport(loss, diagnostics)

    def _draw(self, context: Context) -> tuple[bool, bool]:
        """Whether to adjust and to explore this batch; the same in every process."""
        generator = batch_generator(context, self.seed, torch.device("cpu"))
        adjust, explore = torch.rand(2, generator=generator).tolist()
        return adjust < self.chances["adjust"], explore < self.chances["explore"]

    def _directions(
        self,
        scores: Tensor,
        positives: Tensor,
        context: Context,
        services: BatchServices,
        tokens: Tokens,
    ) -> list[tuple[Side[Any], HardTriplets]]:
        """Texts as candidates of images, then images as candidates of texts."""
        negatives = ~positives if context.protected is None else ~(positives | context.protected)
        rows = own_slice(len(services.images), scores.device)
        columns = own_slice(len(services.texts), scores.device)
        image = pair_images(services.batch)
        text = torch.arange(len(image), device=image.device)
        of_images = (image, text + columns.start, self.margin)  # anchors and positives
        of_texts = (text, image + rows.start, self.margin)
        share = self.shares
        return [
            (
                TextSide(services, tokens, share["exchange_words"], share["mask_words"]),
                HardTriplets.of(scores[rows], negatives[rows], *of_images),
            ),
            (
                ImageSide(services, tokens, share["exchange_regions"], share["mask_regions"]),
                HardTriplets.of(scores.T[columns], negatives.T[columns], *of_texts),
            ),
        ]

    def _counterfactual_losses(
        self, side: Side[Any], triplets: HardTriplets, adjusts: bool, explores: bool
    ) -> dict[str, Tensor]:
        """Losses of the counterfactual candidates of one direction."""
        own, other = side.rankings(triplets.positive, triplets.negative, triplets.anchor)
        positive, negative = side.take(triplets.positive), side.take(triplets.negative)
        counted, score = gather_rows(triplets.counted), partial(side.score, anchors=triplets.anchor)
        losses: dict[str, Tensor] = {}
        if adjusts:
            true, false = gather_rows(triplets.score), side.exchange(positive, negative, own, other)
            losses["cfm/adjusted"] = counterfactual_loss(true, score(false), self.margin2, counted)
        if explores:
            true, false = score(side.mask(positive, own)), score(side.mask(negative, other))
            losses["cfm/explored"] = counterfactual_loss(true, false, self.margin2, counted)
        return losses

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """Unknown: it depends on the random draws of each batch."""
        return None
