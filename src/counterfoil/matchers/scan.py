"""SCAN: stacked cross attention (Lee et al. 2018), text-to-image and image-to-text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from counterfoil.core.registry import refuse_unused
from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import (
    Tile,
    l2_over,
    leaky,
    masked_softmax,
    packed_cosine,
)
from counterfoil.kernels.spec import KernelSpec, ScoringJob
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher, WordParts, one_pair

Aggregation = Literal["lse", "mean", "max", "sum"]
RawNorm = Literal[
    "clipped_l2norm", "l2norm", "clipped", "softmax", "l1norm", "clipped_l1norm", "none"
]


def normalize_raw(
    sims: Tensor, query_mask: Tensor | None, dim: int, norm: RawNorm, scale: float = 1.0
) -> Tensor:
    """SCAN's raw_feature_norm: similarities normalized over the query fragments (``dim``).

    They are then multiplied by ``scale``. ``query_mask`` marks the real ones (None: all). The two
    l1 forms are undefined in the public code; here they are L1 norms.
    """
    if norm == "none":
        return scale * sims
    if norm == "softmax":
        return scale * masked_softmax(sims, query_mask, dim)
    x = leaky(sims) if norm.startswith("clipped") else sims
    if norm == "clipped":
        return scale * x
    x = x if query_mask is None else x.masked_fill(~query_mask, 0.0)
    if norm.endswith("l2norm"):
        return l2_over(x, dim, scale)
    return x * (scale / (x.abs().sum(dim, keepdim=True) + 1e-8))


def aggregate(
    parts: Tensor, mask: Tensor | None, how: Aggregation, lambda_lse: float, dim: int = -1
) -> Tensor:
    """Pool the relevances of real fragments (``dim``) into one score.

    LSE is (1/λ) log Σ exp(λ r): a sum, not a mean, as in the paper's eq. 5.
    """
    if how in ("lse", "max"):
        real = parts if mask is None else parts.masked_fill(~mask, -torch.inf)
        return real.amax(dim) if how == "max" else (lambda_lse * real).logsumexp(dim) / lambda_lse
    if mask is None:
        return parts.sum(dim) if how == "sum" else parts.mean(dim)
    total = parts.masked_fill(~mask, 0.0).sum(dim)
    return total if how == "sum" else total / mask.sum(dim).clamp(min=1)


class CrossAttention(CrossAttentionMatcher):
    """Each query fragment attends to the keys; its cosines with the contexts are aggregated."""

    query_side: Literal["text", "image"] = "text"

    def __init__(
        self,
        embed_size: int | None,
        lambda_softmax: float,
        lambda_lse: float,
        aggregation: Aggregation,
        raw_norm: RawNorm,
    ) -> None:
        super().__init__(embed_size)
        self.lambda_softmax, self.lambda_lse = lambda_softmax, lambda_lse
        self.aggregation, self.raw_norm = aggregation, raw_norm
        if aggregation != "lse":
            mode = f"aggregation={aggregation}"
            refuse_unused(type(self), "model.matcher", mode, lambda_lse=lambda_lse)

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        activation: dict[str, Literal["leaky", "none"]] = {
            "clipped_l2norm": "leaky",
            "l2norm": "none",
        }
        if self.raw_norm not in activation:
            return ()
        return (
            KernelSpec(
                "scan",
                self.query_side,
                scale=self.lambda_softmax,
                pooling=self.aggregation,
                lse_scale=self.lambda_lse,
                activation=activation[self.raw_norm],
            ),
        )

    def score(self, tile: Tile) -> Tensor:
        parts, _ = self.relevance(tile)
        mask = tile.query_mask(parts.ndim)
        return aggregate(parts, mask, self.aggregation, self.lambda_lse, dim=1)

    def relevance(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Cosine [Q, N, C] with the attended context, and the weights [Q, N, C, K]."""
        sims, mask = tile.sims_QNCK, tile.query_mask(4)
        logits = normalize_raw(sims, mask, 1, self.raw_norm, self.lambda_softmax)
        weights = masked_softmax(logits, tile.key_mask_CK)
        return packed_cosine(tile.sims_QNCK, weights, tile.gram_CKK, tile.norms_QN), weights


@matchers.register("scan-t2i")
class SCANT2I(CrossAttention):
    """SCAN t2i: each word attends to regions; cosines of words and contexts, aggregated."""

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        lambda_softmax: float = 9.0,
        lambda_lse: float = 6.0,
        aggregation: Aggregation = "lse",
        raw_norm: RawNorm = "clipped_l2norm",
    ) -> None:
        super().__init__(embed_size, lambda_softmax, lambda_lse, aggregation, raw_norm)

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.aggregation not in ("mean", "sum"):
            return None
        tile, to_padded = one_pair(text, image)
        relevance, weights = self.relevance(tile)
        effect = relevance[0, :, 0] / (tile.sims_QNCK.shape[1] if self.aggregation == "mean" else 1)
        return WordParts.from_effects(effect, weights[0, :, 0], to_padded)


@matchers.register("scan-i2t")
class SCANI2T(CrossAttention):
    """SCAN i2t: each region attends to words; cosines of regions and contexts, aggregated."""

    query_side = "image"

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        lambda_softmax: float = 4.0,
        lambda_lse: float = 5.0,
        aggregation: Aggregation = "lse",
        raw_norm: RawNorm = "clipped_l2norm",
    ) -> None:
        super().__init__(embed_size, lambda_softmax, lambda_lse, aggregation, raw_norm)

    def torch_scores(self, images: Encoded, texts: Encoded) -> Tensor:
        return self.attend(images, texts, self.score)


@matchers.register("scan")
class SCAN(CrossAttentionMatcher):
    """SCAN's best published form: the mean of a t2i and an i2t score of one pair of encoders."""

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        lambda_t2i: float = 9.0,
        lambda_i2t: float = 4.0,
        aggregation: Aggregation = "mean",
        raw_norm: RawNorm = "clipped_l2norm",
    ) -> None:
        super().__init__(embed_size)
        self.t2i = SCANT2I(
            embed_size, lambda_softmax=lambda_t2i, aggregation=aggregation, raw_norm=raw_norm
        )
        self.i2t = SCANI2T(
            embed_size, lambda_softmax=lambda_i2t, aggregation=aggregation, raw_norm=raw_norm
        )

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        parts = [part.score_block(images, texts, job) for part in (self.t2i, self.i2t)]
        return (parts[0] + parts[1]) / 2
