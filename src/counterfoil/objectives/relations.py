"""HREM's relations between instances: a graph over the batch that only training sees."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.errors import ConfigError
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.contrastive import at_least_float32
from counterfoil.objectives.distance import DistanceWeighted
from counterfoil.objectives.diversity import encoded_members
from counterfoil.objectives.instance_graph import Form, InstanceGraph, Side
from counterfoil.objectives.services import Preparation
from counterfoil.objectives.triplet import HardestNegative
from counterfoil.registry import refuse_unused


@objectives.register("hrem-graph")
class InstanceRelations(Objective):
    """HREM: embeddings after a look at their batch must match too (Fu et al. 2023).

    From step ``warmup`` on, a transformer layer over the graph of all images and texts of the batch
    (`InstanceGraph`) gives each a second embedding. The loss is that of the plain images with the
    second texts, of the second images with the plain texts and of both second ones, plus
    ``reg_weight`` times the regulariser of the graph. The loss of the plain embeddings is another
    term: ``{"distance-weighted": 1, "hrem-graph": 1}``.

    ``loss="trip"`` samples a negative by its distance, up to ``nonzero_cut_off`` (1.7 on Flickr30K,
    1.9 on COCO), "vse" takes the hardest. ``mask_weight`` (1.5 on COCO) is that of the learned
    relevance in the attention. ``form="reference"``: see `InstanceGraph`.
    """

    needs_batch = True
    needs = "both"

    def __init__(
        self,
        *,
        loss: Literal["trip", "vse"] = "trip",
        margin: float = 0.2,
        nonzero_cut_off: float = 1.7,
        warmup: int = 8000,
        heads: int = 0,
        dropout: float = 0.1,
        threshold: float = 0.5,
        topk: int = 10,
        mask_weight: float = 1.0,
        reg_weight: float = 10.0,
        form: Form = "paper",
    ) -> None:
        super().__init__()
        if loss == "vse":
            kind, key = InstanceRelations, "objective.hrem-graph"
            refuse_unused(kind, key, "loss=vse", nonzero_cut_off=nonzero_cut_off)
        self.warmup, self.reg_weight = warmup, reg_weight
        self.build = partial(
            InstanceGraph,
            heads=heads,
            dropout=dropout,
            threshold=threshold,
            topk=topk,
            mask_weight=mask_weight,
            form=form,
        )
        self.graph: InstanceGraph | None = None
        self.own: Objective = (
            HardestNegative(margin=margin)
            if loss == "vse"
            else DistanceWeighted(margin=margin, nonzero_cut_off=nonzero_cut_off)
        )

    def hinge_margin(self, epoch: int) -> float | None:
        return self.own.hinge_margin(epoch)

    def prepare(self, training: Preparation) -> None:
        self.graph = self.build(training.embed_size)

    def forward(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        if context.step < self.warmup:
            return LossReport(0.0 * scores.sum())
        pairs = [(side(images), side(texts)) for images, texts in encoded_members(context)]
        losses, regularisers = zip(
            *(self._one_copy(*pair, positives, context) for pair in pairs), strict=True
        )
        regulariser = torch.stack(regularisers).mean()
        return LossReport(
            torch.stack(losses).mean() + self.reg_weight * regulariser,
            {"hrem/regulariser": regulariser.detach()},
        )

    def _one_copy(
        self, images: Side, texts: Side, positives: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        if self.graph is None:
            raise ConfigError("objective.hrem-graph: its graph is made when a run is prepared")
        seen = self.graph(images, texts)
        pairs = [
            (images.whole, seen.texts),
            (seen.images, texts.whole),
            (seen.images, seen.texts),
        ]
        reports: list[LossReport] = [self.own(x @ y.T, positives, context) for x, y in pairs]
        return torch.stack([report.loss for report in reports]).sum(), seen.regulariser


def side(encoded: Encoded) -> Side:
    """What the graph reads of one modality; no gradient goes to the fragments."""
    if encoded.pooled is None or encoded.fragments is None:
        raise ConfigError(
            "objective.hrem-graph: reads one vector an item and its fragments; use a model that "
            "pools, such as hrem or vse-infty"
        )
    return Side(
        at_least_float32(encoded.pooled),
        at_least_float32(encoded.fragments.detach()),
        encoded.mask,
    )
