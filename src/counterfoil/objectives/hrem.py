"""HREM: a relation graph over the instances of a batch, used in training only (Fu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import refuse_unused
from counterfoil.core.tensors.modes import attention_without_cudnn
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.pooling import relation_layer
from counterfoil.kernels.attention import leaky, similarities
from counterfoil.objectives.base import Context, LossReport, Objective, at_least_float32, objectives
from counterfoil.objectives.distance_weighted import DistanceWeighted
from counterfoil.objectives.dive import distances, encoded_members
from counterfoil.objectives.services import RunSetup
from counterfoil.objectives.triplet import HardestNegative

Form = Literal["paper", "reference"]

MAX_CELLS = 1 << 24
"""Word-region similarities computed at a time."""

ROUNDING = 8
"""Units in the last place of 1 by which equal similarities may differ."""


@dataclass(frozen=True)
class Side:
    """One modality of a batch: unit vectors [B, D], their fragments [B, N, D], mask [B, N]."""

    whole: Tensor
    fragments: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Matches:
    """For each pair of instances, the highest similarities of the query's fragments with the key's.

    ``top`` [A, B, k] are the k largest over query fragments, ``mean`` [A, B] is over all of them.
    """

    top: Tensor
    mean: Tensor


@dataclass(frozen=True)
class Relations:
    """``connected`` and ``relevance`` [I+T, I+T] of all nodes, images before texts.

    ``image_to_text`` [I, T] and ``text_to_image`` [T, I] are the cross-modal parts of relevance.
    """

    connected: Tensor
    relevance: Tensor
    image_to_text: Tensor
    text_to_image: Tensor


@dataclass(frozen=True)
class SecondEmbeddings:
    """Embeddings of images and texts after the graph, of unit length, and the regularizer."""

    images: Tensor
    texts: Tensor
    regularizer: Tensor


class InstanceGraph(nn.Module):
    """A transformer layer over images and texts, its attention biased by learned relevance.

    A node is connected to the nearer half (``threshold``) of each modality. Relevance within a
    modality is exp(−distance). Across modalities, a small MLP computes it from the ``topk`` best
    word-region matches, plus the mean match. The regularizer is the KL divergence of that relevance
    from exp(−distance) of the embeddings.

    With fewer than ``topk`` words or regions, missing matches are zero. ``form="reference"`` uses
    padded words instead, as the public code does, and includes padded regions throughout.
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

    def forward(self, images: Side, texts: Side) -> SecondEmbeddings:
        relations, count = self.relations(images, texts), len(images.whole)
        bias = self.mask_weight * relations.relevance
        bias = bias.masked_fill(~relations.connected, -torch.inf)
        nodes = torch.cat([images.whole, texts.whole])
        with attention_without_cudnn():
            nodes = F.normalize(self.layer(nodes[None], bias)[0], dim=-1)
        target = (-distances(images.whole.detach(), texts.whole.detach())).exp()
        regularizer = divergence(relations.image_to_text, target)
        regularizer = regularizer + divergence(relations.text_to_image, target.T)
        return SecondEmbeddings(nodes[:count], nodes[count:], regularizer)

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

    def _nearest(self, similarity: Tensor) -> Tensor:
        """Mask of the columns in the best share of their row, and of those equal to the last one.

        Equal up to rounding: of identical captions one must not be connected by chance.
        """
        count = max(1, int(similarity.shape[1] * self.threshold))
        last = similarity.topk(count, dim=1).values[:, -1:]
        return similarity >= last - ROUNDING * torch.finfo(similarity.dtype).eps

    @torch.no_grad()
    def matches(self, images: Side, texts: Side) -> tuple[Matches, Matches]:
        """Matches of words with images [T, I] and regions with texts [I, T], in blocks of texts."""
        per_text = max(1, len(images.whole) * images.mask.shape[1] * texts.mask.shape[1])
        size = max(1, MAX_CELLS // per_text)
        regions, words = (F.normalize(part.fragments, dim=-1) for part in (images, texts))
        region_mask = torch.ones_like(images.mask) if self.form == "reference" else images.mask
        parts = [
            self._matches(regions, region_mask, *block)
            for block in zip(words.split(size), texts.mask.split(size), strict=True)
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
        scaled = F.normalize(sims, dim=2).masked_fill(~region_mask[:, None, None], -torch.inf)
        best = scaled.amax(3)  # [I, T, W]
        best = best.masked_fill(~region_mask.any(1)[:, None, None], 0.0).transpose(0, 1)
        of_words = Matches(
            self._top(best, counted[:, None]), _masked_mean(best, word_mask[:, None])
        )
        scaled = F.normalize(sims, dim=3).masked_fill(~word_mask[None, :, :, None], -torch.inf)
        best = scaled.amax(2).masked_fill(~word_mask.any(1)[None, :, None], 0.0)  # [I, T, R]
        of_regions = Matches(
            self._top(best, region_mask[:, None]), _masked_mean(best, region_mask[:, None])
        )
        return of_words, of_regions

    def _top(self, values: Tensor, mask: Tensor) -> Tensor:
        """The ``topk`` largest real values, padded with zeros."""
        count = min(self.topk, values.shape[-1])
        top = values.masked_fill(~mask, -torch.inf).topk(count, dim=-1).values
        return F.pad(top.masked_fill(top.isinf(), 0.0), (0, self.topk - count))


def divergence(relevance: Tensor, guide: Tensor) -> Tensor:
    """KL of the softmax of each row of relevance from that of the guide; mean over rows."""
    target = relevance.log_softmax(-1)
    return F.kl_div(guide.log_softmax(-1), target, reduction="batchmean", log_target=True)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def _blocks(images: Tensor, across: Tensor, back: Tensor, texts: Tensor) -> Tensor:
    return torch.cat([torch.cat([images, across], 1), torch.cat([back, texts], 1)])


@objectives.register("hrem-graph")
class HREM(Objective):
    """HREM: embeddings after attention over their batch must match as well (Fu et al. 2023).

    From step ``warmup`` on, a transformer layer over the graph of all images and texts of the batch
    (`InstanceGraph`) computes second embeddings. The loss is the sum over three score matrices
    (plain images with second texts, second images with plain texts, both second), plus
    ``reg_weight`` times the regularizer of the graph. Add the loss of the plain embeddings as
    another term: ``{"distance-weighted": 1, "hrem-graph": 1}``.

    ``loss="trip"`` samples a negative by its distance, up to ``nonzero_cut_off`` (1.7 on Flickr30K,
    1.9 on COCO); "vse" takes the hardest. ``mask_weight`` (1.5 on COCO) is the weight of the
    learned relevance in the attention. ``form="reference"``: see `InstanceGraph`.
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
        self._require_nonnegative(margin=margin, warmup=warmup, reg_weight=reg_weight)
        self._require_positive(nonzero_cut_off=nonzero_cut_off, topk=topk)
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

    def never_reached(self, epochs: int, steps_per_epoch: int) -> list[str]:
        steps = epochs * steps_per_epoch
        if not self.warmup or self.warmup < steps:
            return []
        return [f"warmup={self.warmup}: the graph is never used in {steps:,} updates"]

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
        second = self.graph(images, texts)
        pairs = [
            (images.whole, second.texts),
            (second.images, texts.whole),
            (second.images, second.texts),
        ]
        reports = [self.own.compute(x @ y.T, positives, context) for x, y in pairs]
        return torch.stack([report.loss for report in reports]).sum(), second.regularizer


def side(encoded: Encoded) -> Side:
    """The graph's input of one modality; fragments get no gradient."""
    if encoded.pooled is None or encoded.fragments is None:
        raise ConfigError(
            "objective.hrem-graph: needs fragments and one vector per item; use a model that "
            "pools, such as hrem or vse-infty"
        )
    return Side(
        at_least_float32(encoded.pooled),
        at_least_float32(encoded.fragments.detach()),
        encoded.mask,
    )
