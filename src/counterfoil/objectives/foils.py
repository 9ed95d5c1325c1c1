"""Foils as extra negative captions: their scores in a batch, and a hinge of each pair to its own.

The contrastive losses with foils (`negclip`, `ce_clip`, `triplet_clip`, `fsc_clip`) are built on
`FoilBased` and `foil_matrix`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_counts, gather_rows, own_slice, rank
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.batches.collate import BatchExtras, PairBatch, TextBatch
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.encoders.encoded import Encoded, Needs
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    NegativeSelection,
    Objective,
    Reduction,
    both_directions,
    objectives,
)
from counterfoil.objectives.services import BatchServices, RunSetup

_MIXING = 0x2545F4914F6CDD1D
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


def anchor_rows(batch: PairBatch, anchors: int) -> Tensor:
    """Captions of this process's share that are among the ``anchors`` of the global batch (0: all).

    They are evenly spaced over the global batch: the same in any number of processes, and divided
    among these.
    """
    count, device = len(batch.owners), batch.owners.device
    counts = gather_counts(count, device)
    if not 0 < anchors < sum(counts):
        return torch.arange(count, device=device)
    shares = anchor_shares(counts, anchors)
    if not all(map(len, shares)):
        raise ConfigError(
            f"anchors={anchors}: a process of {len(counts)} has no anchor among its pairs of a "
            f"batch of {sum(counts)}; set at least {2 * len(counts)} anchors, 0 (all), or start "
            "fewer processes; if this was the smaller last batch of an epoch, train.drop_last=true"
        )
    return shares[rank()].to(device)


def anchor_shares(counts: Sequence[int], anchors: int) -> list[Tensor]:
    """Rows of each process's share that are anchors, if the processes have ``counts`` pairs.

    Twice as many anchors as processes, or more, leave no process of equal shares without one.
    """
    total = sum(counts)
    spaced = (2 * torch.arange(anchors) + 1) * total // (2 * anchors)
    return [rows - start for rows, start in _divided(spaced, counts)]


def _divided(rows: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """The rows of a global batch that are in each process's share, and the share's first row."""
    start = 0
    for count in counts:
        yield rows[(rows >= start) & (rows < start + count)], start
        start += count


class FoilBased(Objective):
    """An objective with foils of each caption: ``count`` of them from a ``source``."""

    requires = "foil captions and the model that scores them"

    def __init__(self, source: str, count: int) -> None:
        super().__init__()
        self.source, self.count = source, count
        self.foils: ExtraNegativeSource | None = None

    def prepare(self, training: RunSetup) -> None:
        self.foils = training.foils(self.source, self.count)

    def extra_negatives(self) -> ExtraNegativeSource | None:
        return self.foils


@objectives.register("foils")
class FoilObjective(FoilBased):
    """Hinge on foils of each caption; use it with another objective: {hardest: 1, foils: 0.5}.

    ``source`` is ``rules`` (or a selection: ``rules:noun,swap``), a JSONL file of foils, or a run
    or pretrained model (``scenes-corrector``) that was trained with TAGS and writes them; ``count``
    foils are added per caption. The cost of a pair is that of its hardest foil (``hardest``), or
    the mean over its foils. A pair without foils costs nothing, and is part of the mean over pairs
    (``reduction="mean"``).
    """

    def __init__(
        self,
        *,
        source: str = "rules",
        count: int = 1,
        margin: float = 0.2,
        reduction: Reduction = "sum",
        hardest: bool = True,
    ) -> None:
        super().__init__(source, count)
        self._require_nonnegative(margin=margin)
        self.margin, self.reduction, self.hardest = margin, reduction, hardest

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "foils")
        positive = both_directions(scores, positives)[0].positive
        if not any(gather_counts(len(extra.text_owners), scores.device)):
            return LossReport(0 * positive.sum())
        foils, owners = foil_scores(services, extra)
        costs = foil_costs(positive, foils, owners, self.margin, self.hardest)
        loss = costs.sum() if self.reduction == "sum" else costs.mean()
        return LossReport(
            loss, foil_diagnostics(positive, foils, owners) if context.logging else {}
        )

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
    texts, owners = foils_or_placeholder(services, extra)
    images = services.images[pair_images(services.batch)[owners.clamp(min=0)]]
    scores = services.paired(images, services.encode_texts(texts))
    all_owners = gather_owners(services, owners)
    real = all_owners != NO_OWNER
    return scores[real], all_owners[real]


def foils_or_placeholder(services: BatchServices, extra: BatchExtras) -> tuple[TextBatch, Tensor]:
    """The foils of this process and their pairs; one caption with `NO_OWNER` if it has none."""
    if extra.texts is not None:
        return extra.texts, extra.text_owners
    return first_text(services.batch.texts), extra.text_owners.new_full((1,), NO_OWNER)


def gather_owners(services: BatchServices, owners: Tensor) -> Tensor:
    """Pairs of the global batch, of all processes; `NO_OWNER` stays."""
    before = own_slice(len(services.batch.owners), owners.device).start
    return gather_rows(torch.where(owners == NO_OWNER, NO_OWNER, owners + before))


@dataclass(frozen=True)
class FoilMatrix:
    """Scores [n_images, F] of all images of a batch with all its foils.

    ``owners`` [F] are the pairs that the foils belong to. ``is_negative`` [n_images, F] is False if
    an image of the batch has a caption with exactly the words of the foil. ``encoded`` are the
    foils of this process, with a placeholder if it has none, of pairs ``local_owners``.
    """

    scores: Tensor
    owners: Tensor
    is_negative: Tensor
    encoded: Encoded
    local_owners: Tensor

    def own(self, rows: Tensor) -> Tensor:
        """Scores [F] of each foil with the image of its pair; ``rows`` [P] are these images."""
        at = rows[self.owners]
        return self.scores[at, torch.arange(len(at), device=at.device)]


def foil_matrix(
    services: BatchServices, extra: BatchExtras, positives: Tensor, needs: Needs | None = None
) -> FoilMatrix | None:
    """The foils of a batch, scored with all images; None if no process has any."""
    if not any(gather_counts(len(extra.text_owners), positives.device)):
        return None
    texts, owners = foils_or_placeholder(services, extra)
    encoded = services.encode_texts(texts, needs)
    scores = services.matrix(services.images, encoded)
    all_owners = gather_owners(services, owners)
    real = (all_owners != NO_OWNER).nonzero()[:, 0]
    captions, foils = (gather_rows(text_keys(x)) for x in (services.batch.texts, texts))
    same = captions[:, None] == foils[None, real]
    has_caption = (positives.float() @ same.float()) > 0
    return FoilMatrix(scores[:, real], all_owners[real], ~has_caption, encoded, owners)


def text_keys(texts: TextBatch) -> Tensor:
    """A number [n] per text, equal for equal token ids, whatever the padding."""
    width = texts.ids.shape[1]
    factors = torch.arange(1, width + 1, device=texts.ids.device) * _MIXING
    keys = (texts.ids + 1) * factors  # integers wrap around
    keys = (keys ^ (keys >> 29)) * _MIXING
    return torch.where(texts.mask, keys, 0).sum(1)


def pair_rows(scores: Tensor, positives: Tensor, context: Context) -> Tensor:
    """Row of the image of each pair, in the order of `both_directions`."""
    if context.on_diagonal and scores.shape[0] == scores.shape[1]:
        return torch.arange(len(scores), device=scores.device)
    return positives.nonzero()[:, 0]


def with_foils(anchors: Anchors, foils: FoilMatrix | None, rows: Tensor) -> Anchors:
    """The anchors of image → text with all foils of the batch as further candidates."""
    if foils is None:
        return anchors
    scores = foils.scores.to(anchors.scores.dtype)
    return Anchors(
        anchors.positive,
        torch.cat([anchors.scores, scores[rows]], 1),
        torch.cat([anchors.is_negative, foils.is_negative[rows]], 1),
    )


def foil_costs(
    positive: Tensor, foils: Tensor, owners: Tensor, margin: float, hardest: bool
) -> Tensor:
    """Hinge cost [P] of each pair: of its hardest foil, or the mean; 0 without foils."""
    costs = (margin + foils - positive[owners]).clamp(min=0)
    if hardest:
        return torch.zeros_like(positive).scatter_reduce(0, owners, costs, "amax")
    number = torch.bincount(owners, minlength=len(positive)).clamp(min=1)
    return add_in_order(torch.zeros_like(positive), owners, costs) / number


def add_in_order(start: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """``start`` with each value added at its index, in an order that is the same in every call.

    On a GPU `index_add` adds in any order, and on a CPU `index_put` does, by several threads.
    """
    if start.is_cuda:
        return start.index_put((index,), values, accumulate=True)
    return start.index_add(0, index, values)


@torch.no_grad()
def foil_diagnostics(positive: Tensor, foils: Tensor, owners: Tensor) -> dict[str, Tensor]:
    """Share of foils that score below the true caption, and the mean difference."""
    gap = positive[owners] - foils
    return {"foils/accuracy": (gap > 0).float().mean(), "foils/gap": gap.mean()}


def first_text(texts: TextBatch) -> TextBatch:
    graph = texts.graph[:1] if texts.graph is not None else None
    return replace(texts, ids=texts.ids[:1], mask=texts.mask[:1], graph=graph)
