"""Foils as extra negative captions: a hinge between each pair and the foils of its caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_counts, gather_rows, rank
from counterfoil.core.errors import TrainingError
from counterfoil.data.batches.collate import BatchExtras, PairBatch, TextBatch
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.objectives.base import (
    Context,
    LossReport,
    NegativeSelection,
    Objective,
    Reduction,
    both_directions,
    objectives,
)
from counterfoil.objectives.services import BatchServices, RunSetup

NO_OWNER = -1
"""Owner of a placeholder text, for a process without foils."""


def extra_items(context: Context, name: str) -> tuple[BatchServices, BatchExtras]:
    """The batch with its model, and the extra items of the objective ``name``."""
    if context.services is None or context.extra is None:
        raise TrainingError(f"objective.{name} works on the batches of a training run only")
    return context.services, context.extra


def pair_images(batch: PairBatch) -> Tensor:
    """Row of the image of each caption of a batch."""
    if len(batch.image_ids) == len(batch.owners):
        return torch.arange(len(batch.owners), device=batch.owners.device)
    return (batch.owners[:, None] == batch.image_ids).int().argmax(1)


@objectives.register("foils")
class FoilObjective(Objective):
    """Hinge on foils of each caption; use it with another objective: {hardest: 1, foils: 0.5}.

    ``source`` is ``rules`` (or a selection: ``rules:noun,swap``) or a JSONL file of foils;
    ``count`` foils are added per caption. The cost of a pair is that of its hardest foil
    (``hardest``), or the mean over its foils. A pair without foils costs nothing, and is part of
    the mean over pairs (``reduction="mean"``).
    """

    requires = "foil captions and the model that scores them"

    def __init__(
        self,
        *,
        source: str = "rules",
        count: int = 1,
        margin: float = 0.2,
        reduction: Reduction = "sum",
        hardest: bool = True,
    ) -> None:
        super().__init__()
        self.source, self.count = source, count
        self.margin, self.reduction, self.hardest = margin, reduction, hardest
        self.foils: ExtraNegativeSource | None = None

    def prepare(self, training: RunSetup) -> None:
        self.foils = training.foils(self.source, self.count)

    def extra_negatives(self) -> ExtraNegativeSource | None:
        return self.foils

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "foils")
        positive = both_directions(scores, positives)[0].positive
        if not any(gather_counts(len(extra.text_owners), scores.device)):
            return LossReport(0 * positive.sum())
        foils, owners = foil_scores(services, extra)
        costs = foil_costs(positive, foils, owners, self.margin, self.hardest)
        loss = costs.sum() if self.reduction == "sum" else costs.mean()
        return LossReport(loss, _diagnostics(positive, foils, owners) if context.logging else {})

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The margin per pair: exact if every caption has a foil."""
        return self.margin if self.reduction == "mean" else anchors * self.margin

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "hardest"


@objectives.register("vse-c")
class VSEC(FoilObjective):
    """Hinge on the hardest of several rule-made foils per caption (VSE-C); add it to `hardest`."""

    def __init__(
        self,
        *,
        kinds: Sequence[str] = ("noun", "numeral", "relation"),
        count: int = 5,
        margin: float = 0.2,
        reduction: Reduction = "sum",
    ) -> None:
        source = f"rules:{','.join(kinds)}"
        super().__init__(source=source, count=count, margin=margin, reduction=reduction)


def foil_scores(services: BatchServices, extra: BatchExtras) -> tuple[Tensor, Tensor]:
    """Scores [F] of the foils of all processes with their images, and the pairs they belong to.

    A process without foils scores one of its captions, which is dropped afterwards: collective
    operations of layers and matchers need all processes.
    """
    texts, owners = extra.texts, extra.text_owners
    if texts is None:
        texts, owners = _first(services.batch.texts), owners.new_full((1,), NO_OWNER)
    images = services.images[pair_images(services.batch)[owners.clamp(min=0)]]
    scores = services.paired(images, services.encode_texts(texts))
    before = sum(gather_counts(len(services.batch.owners), owners.device)[: rank()])
    all_owners = gather_rows(torch.where(owners == NO_OWNER, NO_OWNER, owners + before))
    real = all_owners != NO_OWNER
    return scores[real], all_owners[real]


def foil_costs(
    positive: Tensor, foils: Tensor, owners: Tensor, margin: float, hardest: bool
) -> Tensor:
    """Hinge cost [P] of each pair: of its hardest foil, or the mean; 0 without foils."""
    costs = (margin + foils - positive[owners]).clamp(min=0)
    if hardest:
        return torch.zeros_like(positive).scatter_reduce(0, owners, costs, "amax")
    number = torch.bincount(owners, minlength=len(positive)).clamp(min=1)
    return torch.zeros_like(positive).index_add(0, owners, costs) / number


@torch.no_grad()
def _diagnostics(positive: Tensor, foils: Tensor, owners: Tensor) -> dict[str, Tensor]:
    """Share of foils that score below the true caption, and the mean difference."""
    gap = positive[owners] - foils
    return {"foils/accuracy": (gap > 0).float().mean(), "foils/gap": gap.mean()}


def _first(texts: TextBatch) -> TextBatch:
    graph = texts.graph[:1] if texts.graph is not None else None
    return replace(texts, ids=texts.ids[:1], mask=texts.mask[:1], graph=graph)
