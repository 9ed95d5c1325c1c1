"""HREM's relations between instances: a graph over the batch that only training sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import refuse_unused
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.pooling import relation_layer
from counterfoil.kernels.attention import leaky, similarities
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.contrastive import at_least_float32
from counterfoil.objectives.distance_weighted import DistanceWeighted
from counterfoil.objectives.dive import distances, encoded_members
from counterfoil.objectives.services import RunSetup
from counterfoil.objectives.triplet import HardestNegative

Form = Literal["paper", "reference"]

MAX_CELLS = 1 << 24
"""Word-region similarities held at a time."""


@dataclass(frozen=True)
class Side:
    """One modality of a batch: unit vectors [B, D], their fragments [B, N, D], mask [B, N]."""

    whole: Tensor
    fragments: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Matches:
    """For each pair of instances, what the fragments of the asking one find in the other.

    ``top`` [A, B, k] are the best matches among the asking fragments, ``mean`` [A, B] is over all.
    """

    top: Tensor
    mean: Tensor


@dataclass(frozen=True)
class Relations:
    """Between all nodes, images before texts: ``connected`` and ``relevance``, both [I+T, I+T].

    ``image_to_text`` [I, T] and ``text_to_image`` [T, I] are the latter's parts across modalities.
    """

    connected: Tensor
    relevance: Tensor
    image_to_text: Tensor
    text_to_image: Tensor


@dataclass(frozen=True)
class Seen:
    """Second embeddings of images and texts, of unit length, and what keeps relevance honest."""

    images: Tensor
    texts: Tensor
    regularizer: Tensor


class InstanceGraph(nn.Module):
    """A transformer layer over images and texts, its attention biased by learned relevance.

    A node is connected to the nearer half (``threshold``) of each modality. Relevance within a
    modality is exp(-distance); across, it is read off the ``topk`` best word-region matches by a
    small MLP, plus the mean match. The regulariser is the divergence of that relevance from what
    the embeddings say.

    Where there are fewer than ``topk`` words or regions, zeros stand in for the missing matches.
    ``form="reference"`` takes padded words instead, as the public code does, and counts padded
    regions throughout.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 0,
        dropout: float = 0.1,
        threshold: float = 0.5,
        topk: int = 10,
        mask_weight: float = 1.0,
        form: Form = "paper",
    ) -> None:
        super().__init__()
        self.threshold, self.topk = threshold, topk
        self.mask_weight, self.form = mask_weight, form
        self.layer = relation_layer(dim, heads, dropout, "objective.hrem-graph.heads")
        self.text_to_image, self.image_to_text = (
            nn.Sequential(nn.Linear(topk, topk), nn.ReLU(), nn.Linear(topk, 1)) for _ in range(2)
        )

    def forward(self, images: Side, texts: Side) -> Seen:
        relations = self.relations(images, texts)
        weighed = self.mask_weight * relations.relevance
        bias = weighed.masked_fill(~relations.connected, -torch.inf)
        nodes = torch.cat([images.whole, texts.whole])
        seen: Tensor = F.normalize(self.layer(nodes[None], bias)[0], dim=-1)
        guide = (-distances(images.whole.detach(), texts.whole.detach())).exp()
        regularizer = divergence(relations.image_to_text, guide)
        regularizer = regularizer + divergence(relations.text_to_image, guide.T)
        return Seen(seen[: len(images.whole)], seen[len(images.whole) :], regularizer)

    def relations(self, images: Side, texts: Side) -> Relations:
        of_words, of_regions = self.matches(images, texts)
        words = self.text_to_image(of_words.top).squeeze(-1) + of_words.mean  # [T, I]
        regions = self.image_to_text(of_regions.top).squeeze(-1) + of_regions.mean  # [I, T]
        relevance = _blocks(
            (-distances(images.whole)).exp(), regions, words, (-distances(texts.whole)).exp()
        )
        x, y = images.whole.detach(), texts.whole.detach()
        connected = _blocks(
            self._nearest(x @ x.T),
            self._nearest(of_regions.mean),
            self._nearest(of_words.mean),
            self._nearest(y @ y.T),
        )
        return Relations(connected, relevance, regions, words)

    def _nearest(self, likeness: Tensor) -> Tensor:
        """Which columns belong to the best share of their row."""
        count = max(1, int(likeness.shape[1] * self.threshold))
        return likeness >= likeness.topk(count, dim=1).values[:, -1:]

    @torch.no_grad()
    def matches(self, images: Side, texts: Side) -> tuple[Matches, Matches]:
        """What words find in images [T, I] and regions in texts [I, T], a few texts at a time."""
        per_text = max(1, len(images.whole) * images.mask.shape[1] * texts.mask.shape[1])
        size = max(1, MAX_CELLS // per_text)
        regions, words = (F.normalize(part.fragments, dim=-1) for part in (images, texts))
        region_mask = torch.ones_like(images.mask) if self.form == "reference" else images.mask
        parts = [
            self._matches(regions, region_mask, some_words, some_mask)
            for some_words, some_mask in zip(words.split(size), texts.mask.split(size), strict=True)
        ]
        of_words = Matches(*(torch.cat([getattr(w, k) for w, _ in parts]) for k in ("top", "mean")))
        of_regions = Matches(
            *(torch.cat([getattr(r, k) for _, r in parts], 1) for k in ("top", "mean"))
        )
        return of_words, of_regions

    def _matches(
        self, regions: Tensor, region_mask: Tensor, words: Tensor, word_mask: Tensor
    ) -> tuple[Matches, Matches]:
        counted = word_mask
        if self.form == "reference":
            first = torch.arange(word_mask.shape[1], device=word_mask.device) < self.topk
            counted = word_mask | first
        sims = leaky(similarities(regions, words)).masked_fill(  # [I, T, W, R]
            ~(counted[None, :, :, None] & region_mask[:, None, None]), 0.0
        )
        found = F.normalize(sims, dim=2).masked_fill(~region_mask[:, None, None], -torch.inf)
        best = found.amax(3)  # [I, T, W]
        best = best.masked_fill(~region_mask.any(1)[:, None, None], 0.0).transpose(0, 1)
        of_words = Matches(
            self._top(best, counted[:, None]), _masked_mean(best, word_mask[:, None])
        )
        found = F.normalize(sims, dim=3).masked_fill(~word_mask[None, :, :, None], -torch.inf)
        best = found.amax(2).masked_fill(~word_mask.any(1)[None, :, None], 0.0)  # [I, T, R]
        of_regions = Matches(
            self._top(best, region_mask[:, None]), _masked_mean(best, region_mask[:, None])
        )
        return of_words, of_regions

    def _top(self, values: Tensor, mask: Tensor) -> Tensor:
        """The ``topk`` largest real values, and zeros for want of more."""
        count = min(self.topk, values.shape[-1])
        top = values.masked_fill(~mask, -torch.inf).topk(count, dim=-1).values
        return F.pad(top.masked_fill(top.isinf(), 0.0), (0, self.topk - count))


def divergence(relevance: Tensor, guide: Tensor) -> Tensor:
    """KL of the softmax of each row of relevance from that of the guide, the mean over rows."""
    target = relevance.log_softmax(-1)
    return F.kl_div(guide.log_softmax(-1), target, reduction="batchmean", log_target=True)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def _blocks(images: Tensor, across: Tensor, back: Tensor, texts: Tensor) -> Tensor:
    return torch.cat([torch.cat([images, across], 1), torch.cat([back, texts], 1)])


@objectives.register("hrem-graph")
class HREM(Objective):
    """HREM: embeddings after attention over their batch must match too (Fu et al. 2023).

    From step ``warmup`` on, a transformer layer over the graph of all images and texts of the batch
    (`InstanceGraph`) gives each a second embedding. The loss is that of the plain images with the
    second texts, of the second images with the plain texts and of both second ones, plus
    ``reg_weight`` times the regulariser of the graph. The loss of the plain embeddings is another
    term: ``{"distance-weighted": 1, "hrem-graph": 1}``.

    ``loss="trip"`` samples a negative by its distance, up to ``nonzero_cut_off`` (1.7 on Flickr30K,
    1.9 on COCO), "vse" takes the hardest. ``mask_weight`` (1.5 on COCO) is that of the learned
    relevance in the attention. ``form="reference"``: see `InstanceGraph`.
    """

    requires = "the encoded vectors and fragments of the batch"
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
            kind, key = HREM, "objective.hrem-graph"
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

    def prepare(self, training: RunSetup) -> None:
        self.graph = self.build(training.embed_size)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        if context.step < self.warmup:
            return LossReport(0.0 * scores.sum())
        pairs = [(side(images), side(texts)) for images, texts in encoded_members(context)]
        losses, regularizers = zip(
            *(self._one_copy(*pair, positives, context) for pair in pairs), strict=True
        )
        regularizer = torch.stack(regularizers).mean()
        return LossReport(
            torch.stack(losses).mean() + self.reg_weight * regularizer,
            {"hrem/regulariser": regularizer.detach()},
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
        reports = [self.own.compute(x @ y.T, positives, context) for x, y in pairs]
        return torch.stack([report.loss for report in reports]).sum(), seen.regularizer


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
