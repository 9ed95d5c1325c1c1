"""CFM: hard negatives made from the regions and words that a decision hangs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_counts, gather_rows, rank
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.objectives.base import Context, LossReport, objectives
from counterfoil.objectives.cfm_perturbations import ImageSide, Side, TextSide, Tokens
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.services import BatchServices, RunSetup
from counterfoil.objectives.triplet import HardestNegative


def counterfactual_loss(
    positive: Tensor, negative: Tensor, margin: float, counted: Tensor | None = None
) -> Tensor:
    """Σ [margin + negative - positive]₊ over the triplets that count."""
    costs = (margin + negative - positive).clamp(min=0)
    return costs.sum() if counted is None else (costs * counted).sum()


@dataclass(frozen=True)
class HardTriplets:
    """Anchors of one direction that violate the margin, as rows of this process's share.

    ``score`` is that of each anchor with its positive. Where no anchor violates it, one stands in
    that does not count (``counted``): every process then does the same work.
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
    """Hardest negatives, and counterfactual negatives made from their decisive parts (CFM).

    The triplets that violate the margin say what matters: the gradient of s(anchor, positive) -
    s(anchor, negative) with respect to each region of the images and to each word of the texts.
    Self-adjustment, in a share ``adjust`` of the batches, makes a harder negative of the positive:
    its top regions (``exchange_regions`` of them) or words (``exchange_words``) give way to the top
    ones of the hard negative. Self-exploration, in a share ``explore``, hides the top
    ``mask_regions`` (behind the mean of the rest) or ``mask_words`` (behind the mask token) of the
    positive and of the negative. Both add a hinge with ``margin2`` against the original anchors.

    A word's importance is that of its occurrence, as the paper has it; the public code takes the
    gradient of the word's row in the table, which sums over the batch. Shares are rounded down but
    change at least one place; start, end and padding are never touched, and the public code may
    touch them. Where several processes train, each makes negatives from its own share of the batch.
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

    def prepare(self, training: RunSetup) -> None:
        self.tokens = Tokens.of(training.text)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, tokens = context.services, self.tokens
        if services is None or tokens is None:
            raise TrainingError(
                "objective 'cfm' makes its negatives from the batch and the model of a training "
                "run: call prepare() first, and give it a context with both"
            )
        report = super().compute(scores, positives, context)
        adjusts, explores = self._drawn(scores.device)
        if not adjusts and not explores:
            return report
        loss, diagnostics = report.loss, dict(report.diagnostics)
        for side, triplets in self._directions(scores, positives, context, services, tokens):
            extra = self._made(side, triplets, adjusts, explores)
            for name, value in extra.items():
                loss = loss + value
                if context.logging:
                    diagnostics[name] = diagnostics.get(name, 0) + value.detach()
        return LossReport(loss, diagnostics)

    def _drawn(self, device: torch.device) -> tuple[bool, bool]:
        """Whether this batch is adjusted and explored; the first process draws for all."""
        draws = gather_rows(torch.rand(1, 2).to(device))[0].tolist()
        return draws[0] < self.chances["adjust"], draws[1] < self.chances["explore"]

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
        rows = _mine(len(services.images), scores.device)
        columns = _mine(len(services.texts), scores.device)
        scores, negatives = scores[rows, columns], negatives[rows, columns]
        image = pair_images(services.batch)
        text = torch.arange(len(image), device=image.device)
        share = self.shares
        return [
            (
                TextSide(services, tokens, share["exchange_words"], share["mask_words"]),
                HardTriplets.of(scores, negatives, image, text, self.margin),
            ),
            (
                ImageSide(services, tokens, share["exchange_regions"], share["mask_regions"]),
                HardTriplets.of(scores.T, negatives.T, text, image, self.margin),
            ),
        ]

    def _made(
        self, side: Side[Any], triplets: HardTriplets, adjusts: bool, explores: bool
    ) -> dict[str, Tensor]:
        """Losses of the candidates made in one direction."""
        mine, theirs = side.rankings(triplets.positive, triplets.negative, triplets.anchor)
        positive, negative = side.take(triplets.positive), side.take(triplets.negative)
        counted = gather_rows(triplets.counted)
        losses: dict[str, Tensor] = {}
        if adjusts:
            made = side.exchange(positive, negative, mine, theirs)
            losses["cfm/adjusted"] = counterfactual_loss(
                gather_rows(triplets.score),
                side.score(made, triplets.anchor),
                self.margin2,
                counted,
            )
        if explores:
            losses["cfm/explored"] = counterfactual_loss(
                side.score(side.mask(positive, mine), triplets.anchor),
                side.score(side.mask(negative, theirs), triplets.anchor),
                self.margin2,
                counted,
            )
        return losses

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """Unknown: it differs from batch to batch with what is drawn."""
        return None


def _mine(count: int, device: torch.device) -> slice:
    """This process's share among the rows of all, of which it has ``count``."""
    first = sum(gather_counts(count, device)[: rank()])
    return slice(first, first + count)
