"""SCAN: stacked cross attention (Lee et al. 2018), text-to-image and image-to-text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import (
    attended_cosine,
    gram,
    l2_over,
    leaky,
    masked_softmax,
    similarities,
)
from counterfoil.matchers.base import matchers
from counterfoil.matchers.local import LocalMatcher, WordParts, fragments

Aggregation = Literal["lse", "mean", "max", "sum"]
RawNorm = Literal[
    "clipped_l2norm", "l2norm", "clipped", "softmax", "l1norm", "clipped_l1norm", "none"
]


def normalise_raw(sims: Tensor, queries: Tensor, dim: int, norm: RawNorm) -> Tensor:
    """SCAN's raw_feature_norm: similarities made comparable over the queries (axis ``dim``).

    ``queries`` says which entries are real. The two l1 forms are undefined in the public code; here
    they are what their names say.
    """
    if norm == "none":
        return sims
    if norm == "softmax":
        return masked_softmax(sims, queries, dim)
    x = leaky(sims) if norm.startswith("clipped") else sims
    if norm == "clipped":
        return x
    x = x.masked_fill(~queries, 0.0)
    if norm.endswith("l2norm"):
        return l2_over(x, dim)
    return x / (x.abs().sum(dim, keepdim=True) + 1e-8)


def aggregate(parts: Tensor, mask: Tensor, how: Aggregation, lambda_lse: float) -> Tensor:
    """Scores of the fragments (last axis) to one score; padding left out.

    LSE is (1/λ) log Σ exp(λ r): a sum, not a mean, as in the paper's equation 5.
    """
    if how == "lse":
        return (lambda_lse * parts).masked_fill(~mask, -torch.inf).logsumexp(-1) / lambda_lse
    if how == "max":
        return parts.masked_fill(~mask, -torch.inf).amax(-1)
    total = parts.masked_fill(~mask, 0.0).sum(-1)
    return total if how == "sum" else total / mask.sum(-1).clamp(min=1)


@matchers.register("scan-t2i")
class ScanTextToImage(LocalMatcher):
    """SCAN t2i: each word attends to regions; cosine of word and attended image, aggregated."""

    floats_per_cell = 7

    def __init__(
        self,
        embed_size: int,
        *,
        lambda_softmax: float = 9.0,
        lambda_lse: float = 6.0,
        aggregation: Aggregation = "lse",
        raw_norm: RawNorm = "clipped_l2norm",
    ) -> None:
        super().__init__(embed_size)
        self.lambda_softmax, self.lambda_lse = lambda_softmax, lambda_lse
        self.aggregation: Aggregation = aggregation
        self.raw_norm: RawNorm = raw_norm

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        relevance, _ = self._relevance(images, texts)
        mask = texts.mask[None].expand_as(relevance)
        return aggregate(relevance, mask, self.aggregation, self.lambda_lse)

    def _relevance(self, images: Encoded, texts: Encoded) -> tuple[Tensor, Tensor]:
        """Cosine [I, T, W] of each word with its attended image, and the weights [I, T, W, R]."""
        v, u = fragments(images), fragments(texts)
        sims = similarities(v, u)  # [I, T, W, R]
        attention = normalise_raw(sims, texts.mask[None, :, :, None], 2, self.raw_norm)
        weights = masked_softmax(self.lambda_softmax * attention, images.mask[:, None, None, :])
        return attended_cosine(sims, weights, gram(v), u.norm(dim=-1)), weights

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.aggregation not in ("mean", "sum"):
            return None
        relevance, weights = self._relevance(image, text)
        words = text.mask.sum() if self.aggregation == "mean" else 1
        effect = relevance[0, 0].masked_fill(~text.mask[0], 0.0) / words
        return WordParts(effect.clamp(min=0), effect.clamp(max=0), weights[0, 0], additive=True)


@matchers.register("scan-i2t")
class ScanImageToText(LocalMatcher):
    """SCAN i2t: each region attends to words; cosine of region and attended sentence."""

    floats_per_cell = 7

    def __init__(
        self,
        embed_size: int,
        *,
        lambda_softmax: float = 4.0,
        lambda_lse: float = 5.0,
        aggregation: Aggregation = "lse",
        raw_norm: RawNorm = "clipped_l2norm",
    ) -> None:
        super().__init__(embed_size)
        self.lambda_softmax, self.lambda_lse = lambda_softmax, lambda_lse
        self.aggregation: Aggregation = aggregation
        self.raw_norm: RawNorm = raw_norm

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        v, u = fragments(images), fragments(texts)
        # the same attention with the roles exchanged: regions ask, words answer
        sims = similarities(u, v)  # [T, I, R, W]
        attention = normalise_raw(sims, images.mask[None, :, :, None], 2, self.raw_norm)
        weights = masked_softmax(self.lambda_softmax * attention, texts.mask[:, None, None, :])
        relevance = attended_cosine(sims, weights, gram(u), v.norm(dim=-1))  # [T, I, R]
        mask = images.mask[None].expand_as(relevance)
        return aggregate(relevance, mask, self.aggregation, self.lambda_lse).T


@matchers.register("scan")
class Scan(LocalMatcher):
    """SCAN as published at its best: the mean of a t2i and an i2t score of one pair of encoders."""

    floats_per_cell = 8

    def __init__(
        self,
        embed_size: int,
        *,
        lambda_t2i: float = 9.0,
        lambda_i2t: float = 4.0,
        aggregation: Aggregation = "mean",
        raw_norm: RawNorm = "clipped_l2norm",
    ) -> None:
        super().__init__(embed_size)
        self.t2i = ScanTextToImage(
            embed_size, lambda_softmax=lambda_t2i, aggregation=aggregation, raw_norm=raw_norm
        )
        self.i2t = ScanImageToText(
            embed_size, lambda_softmax=lambda_i2t, aggregation=aggregation, raw_norm=raw_norm
        )

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        return (self.t2i.tile(images, texts) + self.i2t.tile(images, texts)) / 2
