"""SGRAF: similarity graph reasoning and attention filtration (Diao et al. 2021).

Shapes: I images, T texts, W words, R regions, D width, S width of a similarity vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from counterfoil.core.distributed import sum_over_processes
from counterfoil.core.errors import DataError
from counterfoil.core.registry import refuse_unused
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.layers import FragmentBatchNorm, linear_before_norm, xavier_linear
from counterfoil.kernels.attention import (
    EPS,
    l2_over,
    leaky,
    masked_softmax,
    similarities,
    square,
    unit_contexts,
)
from counterfoil.kernels.spec import ScoringJob
from counterfoil.matchers.base import Matcher, matchers, pooled
from counterfoil.matchers.fragment_matcher import (
    FragmentMatcher,
    aligned,
    fragments,
    single_linear,
    single_precision,
)

Form = Literal["paper", "reference"]

REFERENCE_KEYS = {
    "v_global_w.embedding_local.0.": "image_vector.local.",
    "v_global_w.embedding_local.1.": "image_vector.local_norm.",
    "v_global_w.embedding_global.0.": "image_vector.whole.",
    "v_global_w.embedding_global.1.": "image_vector.whole_norm.",
    "v_global_w.embedding_common.0.": "image_vector.common.",
    "t_global_w.embedding_local.0.": "text_vector.local.",
    "t_global_w.embedding_global.0.": "text_vector.whole.",
    "t_global_w.embedding_common.0.": "text_vector.common.",
    "sim_tranloc_w.": "local_similarity.",
    "sim_tranglo_w.": "global_similarity.",
    "sim_eval_w.": "score.",
    "SAF_module.attn_sim_w.": "attend.",
    "SAF_module.bn.": "norm.",
} | {
    f"SGR_module.{step}.{theirs}.": f"steps.{step}.{ours}."
    for step in range(9)
    for theirs, ours in zip(
        ("graph_query_w", "graph_key_w", "sim_graph_w"), ("query", "key", "update"), strict=True
    )
}
"""Prefixes of weight names in the public similarity encoder, and here."""


class GlobalVector(nn.Module):
    """One unit vector of an item: self-attention with the mean fragment as query.

    ``norm`` adds batch norms (for images): over the channels of real regions, or over ``slots``.
    """

    def __init__(self, dim: int, dropout: float, norm: bool = False, slots: int = 0) -> None:
        super().__init__()
        self.local, self.whole = xavier_linear(dim, dim), xavier_linear(dim, dim)
        self.common = xavier_linear(dim, 1)
        self.local_norm = FragmentBatchNorm(slots or dim) if norm else None
        self.whole_norm = FragmentBatchNorm(dim) if norm else None
        self.dropout, self.slots = nn.Dropout(dropout), slots

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.masked_fill(~mask[..., None], 0.0)
        mean = x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        channels = None if self.slots else self.local_norm
        local = self._normalize(linear_before_norm(self.local, channels, x), mask)
        whole = linear_before_norm(self.whole, self.whole_norm, mean)
        if self.whole_norm is not None:
            whole = self.whole_norm(whole)
        local, whole = self.dropout(local.tanh()), self.dropout(whole.tanh())
        weights = masked_softmax(self.common(local * whole[:, None]).squeeze(-1), mask)
        return l2_over(torch.einsum("bn,bnd->bd", weights, x), -1)

    def _normalize(self, local: Tensor, mask: Tensor) -> Tensor:
        if self.local_norm is None:
            return local
        if not self.slots:
            return self.local_norm(local, mask)
        if mask.shape[1] != self.slots or not mask.all():
            raise DataError(
                f"form='reference' of SGRAF reads {self.slots} regions of every image, found "
                f"{int(mask.sum(1).min())} to {int(mask.sum(1).max())}; "
                "model.matcher.form=paper reads any number"
            )
        return self.local_norm(local.transpose(1, 2)).transpose(1, 2)


class AlignmentMatcher(FragmentMatcher):
    """Base of SGR and SAF: similarity vectors of all alignments of a pair, local and global.

    The public code normalizes a batch of images per *slot* of its 36 regions, so that the position
    of a region in the list matters (``form="reference"``). By default the statistics are per
    channel over all real regions, independent of their number and order.
    """

    compiles = True

    embed_size: int

    def __init__(
        self,
        embed_size: int,
        sim_dim: int,
        lambda_softmax: float,
        dropout: float,
        form: Form,
        slots: int,
    ) -> None:
        super().__init__(embed_size)
        self.sim_dim, self.lambda_softmax = sim_dim, lambda_softmax
        if form == "paper":
            refuse_unused(type(self), "model.matcher", "form=paper", slots=slots)
            slots = 0
        self.image_vector = GlobalVector(embed_size, dropout, norm=True, slots=slots)
        self.text_vector = GlobalVector(embed_size, dropout)
        self.local_similarity = xavier_linear(embed_size, sim_dim)
        self.global_similarity = xavier_linear(embed_size, sim_dim)
        self.score = xavier_linear(sim_dim, 1)

    def infer(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """The vector [I, T, S] of each pair from its alignments [I, T, 1 + W, S], global first."""
        raise NotImplementedError

    def cells_per_pair(self, words: int, regions: int) -> int:
        # contexts, differences and squares have width D; nodes and their projections width S
        return (words + 1) * (regions + (4 * self.embed_size + 16 * self.sim_dim) // 8)

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        # once per block, not per tile: batch statistics and dropout must not depend on tiles
        images = replace(images, pooled=self.image_vector(fragments(images), images.mask))
        texts = replace(texts, pooled=self.text_vector(fragments(texts), texts.mask))
        return super().score_block(images, texts, job)

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        nodes = self._alignments(aligned(images), texts)
        mask = torch.cat([torch.ones_like(texts.mask[:, :1]), texts.mask], dim=1)  # [T, 1 + W]
        vectors = self.infer(nodes, mask)
        with single_precision(vectors.device):
            return torch.sigmoid(single_linear(self.score, vectors).squeeze(-1))

    def _alignments(self, images: Encoded, texts: Encoded) -> Tensor:
        """s(x, y; W) = W|x − y|² / ‖W|x − y|²‖ of each word and of the whole pair."""
        v, u = fragments(images), fragments(texts)
        relevant = leaky(similarities(v, u)).masked_fill(~texts.mask[None, :, :, None], 0.0)
        attention = l2_over(relevant, 2)  # over words, as in SCAN
        weights = masked_softmax(self.lambda_softmax * attention, images.mask[:, None, None, :])
        contexts = unit_contexts(weights, v)
        local = self.local_similarity(square(contexts - u.to(contexts.dtype)))  # [I, T, W, S]
        difference = pooled(images, "image")[:, None] - pooled(texts, "text")
        whole = self.global_similarity(difference.square())  # [I, T, S]
        return l2_over(torch.cat([whole[:, :, None], local], dim=2), -1)


class ReasoningStep(nn.Module):
    """One step over the graph of alignments: ReLU(W_r Σ_q e(p, q) s_q)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = xavier_linear(dim, dim), xavier_linear(dim, dim)
        self.update = xavier_linear(dim, dim)

    def forward(self, receivers: Tensor, nodes: Tensor, mask: Tensor) -> Tensor:
        logits = self.query(receivers) @ self.key(nodes).transpose(-1, -2)
        edges = masked_softmax(logits, mask[None, :, None, :])
        return torch.relu(self.update(edges @ nodes))


@matchers.register("sgr")
class SGR(AlignmentMatcher):
    """SGR: graph reasoning over the alignments of a pair; the global node gives the score."""

    def __init__(
        self,
        embed_size: int,
        *,
        sim_dim: int = 256,
        steps: int = 3,
        lambda_softmax: float = 9.0,
        dropout: float = 0.4,
        form: Form = "paper",
        slots: int = 36,
    ) -> None:
        super().__init__(embed_size, sim_dim, lambda_softmax, dropout, form, slots)
        self.steps = nn.ModuleList(ReasoningStep(sim_dim) for _ in range(steps))

    def infer(self, nodes: Tensor, mask: Tensor) -> Tensor:
        for number, step in enumerate(self.steps, start=1):
            # only the global node is read at the end, so only it takes the last step
            receivers = nodes[:, :, :1] if number == len(self.steps) else nodes
            nodes = step(receivers, nodes, mask)
        return nodes[:, :, 0]


class AlignmentNorm(nn.BatchNorm1d):
    """Batch normalization of one number per alignment [I, T, N], separately for each text.

    In training the statistics of a text are over its alignments with all images of all processes,
    as in the public code, so they do not depend on which texts share a tile. The running statistics
    take one step per batch, towards the mean over its texts. The public code takes one step per
    text, so that its last (and shortest) few texts determine them.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._statistics: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        assert self.running_mean is not None  # noqa: S101 - tracking is always on here
        assert self.running_var is not None  # noqa: S101
        if not self.training:
            return self._scale(x, self.running_mean, self.running_var)
        wide = x if x.dtype == torch.float64 else x.float()
        rows = mask.to(wide.dtype).expand_as(wide)
        count = sum_over_processes(rows.sum((0, 2)))  # [T]
        mean = sum_over_processes((wide * rows).sum((0, 2))) / count
        centered = (wide - mean[:, None]) * rows
        variance = sum_over_processes(centered.square().sum((0, 2))) / count
        if self._statistics is not None:
            with torch.no_grad():  # recomputing a tile must record the same operations
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self._statistics.append((mean.detach(), unbiased))
        return self._scale(x, mean[:, None], variance[:, None])

    def _scale(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return x * scale.to(x.dtype) + (self.bias - mean * scale).to(x.dtype)

    @contextmanager
    def running_update(self) -> Iterator[None]:
        """Update the running statistics from the texts inside, not from tiles recomputed later."""
        self._statistics = []
        try:
            yield
            if self._statistics:
                self._update(*(torch.cat(part) for part in zip(*self._statistics, strict=True)))
        finally:
            self._statistics = None

    @torch.no_grad()
    def _update(self, means: Tensor, variances: Tensor) -> None:
        assert self.running_mean is not None  # noqa: S101
        assert self.running_var is not None  # noqa: S101
        momentum = self.momentum if self.momentum is not None else 0.1
        self.running_mean.lerp_(means.mean().to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variances.mean().to(self.running_var.dtype), momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)


@matchers.register("saf")
class SAF(AlignmentMatcher):
    """SAF: attention weights over alignments; their weighted sum gives the score.

    In training a tile holds all images, because the batch statistics of a text are over all of
    them (`AlignmentNorm`).
    """

    def __init__(
        self,
        embed_size: int,
        *,
        sim_dim: int = 256,
        lambda_softmax: float = 9.0,
        dropout: float = 0.4,
        form: Form = "paper",
        slots: int = 36,
    ) -> None:
        super().__init__(embed_size, sim_dim, lambda_softmax, dropout, form, slots)
        self.attend, self.norm = xavier_linear(sim_dim, 1), AlignmentNorm()

    @property
    def cuts_images(self) -> bool:
        return not self.training

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        with self.norm.running_update():
            return super().score_block(images, texts, job)

    def infer(self, nodes: Tensor, mask: Tensor) -> Tensor:
        logits = linear_before_norm(self.attend, self.norm, nodes).squeeze(-1)
        gates = torch.sigmoid(self.norm(logits, mask))  # [I, T, 1 + W]
        gates = gates.masked_fill(~mask, 0.0)
        weights = gates / (gates.sum(-1, keepdim=True) + EPS)
        return l2_over(torch.einsum("itn,itns->its", weights, nodes), -1)


@matchers.register("sgraf")
class SGRAF(Matcher):
    """SGRAF: the mean of an SGR and an SAF score, two similarity modules on one pair of encoders.

    The paper trains two models and averages their scores (`counterfoil evaluate` does that with
    any two models); this is one model with both modules.
    """

    def __init__(
        self,
        embed_size: int,
        *,
        sim_dim: int = 256,
        steps: int = 3,
        lambda_softmax: float = 9.0,
        dropout: float = 0.4,
        form: Form = "paper",
        slots: int = 36,
    ) -> None:
        super().__init__(embed_size)
        shared: dict[str, Any] = {
            "sim_dim": sim_dim,
            "lambda_softmax": lambda_softmax,
            "dropout": dropout,
            "form": form,
            "slots": slots,
        }
        self.sgr = SGR(embed_size, steps=steps, **shared)
        self.saf = SAF(embed_size, **shared)

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        parts = [part.score_block(images, texts, job) for part in (self.sgr, self.saf)]
        return (parts[0] + parts[1]) / 2
