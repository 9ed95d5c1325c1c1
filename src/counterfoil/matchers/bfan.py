"""BFAN: bidirectional focal attention (Liu et al. 2019). Irrelevant fragments get no attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import (
    EPS,
    TIE,
    Tile,
    leaky,
    masked_softmax,
    packed_cosine,
    query_mean,
)
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher, WordParts, one_pair

Focal = Literal["equal", "prob"]


def focus(weights: Tensor, mask: Tensor | None, focal: Focal) -> Tensor:
    """Attention weights (last axis) with those of irrelevant fragments set to zero.

    Fragment j is irrelevant if Σ_k (w_j − w_k) g_k < 0, that is, if it gets less attention than the
    others on average. The average is plain (equal, g = 1) or weighted by confidence
    (prob, g = √w_k). The selection has no gradient.
    """
    with torch.no_grad():
        if focal == "prob":
            trust = weights.sqrt()
        else:
            trust = torch.ones_like(weights) if mask is None else mask.to(weights.dtype)
        tie = max(TIE, 4 * torch.finfo(weights.dtype).eps)
        average = (weights * trust).sum(-1, keepdim=True)
        relevant = weights * trust.sum(-1, keepdim=True) > average * (1 - tie)
    return weights.masked_fill(~relevant, 0.0)


@matchers.register("bfan")
class BFAN(CrossAttentionMatcher):
    """BFAN: words attend to the relevant regions, regions to the relevant words; cosines, averaged.

    The score is the sum of both directions (up to 2), or one of them.
    """

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        focal: Focal = "equal",
        lambda_softmax: float = 20.0,
        direction: Literal["both", "t2i", "i2t"] = "both",
    ) -> None:
        super().__init__(embed_size)
        self.focal: Focal = focal
        self.lambda_softmax, self.direction = lambda_softmax, direction

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        words = KernelSpec("bfan", scale=self.lambda_softmax, prob=self.focal == "prob")
        regions = replace(words, query_side="image")
        both = {"t2i": (words,), "i2t": (regions,), "both": (words, regions)}
        return both[self.direction]

    def torch_scores(self, images: Encoded, texts: Encoded) -> Tensor:
        if self.direction == "t2i":
            return self.attend(texts, images, self.score).T
        i2t = self.attend(images, texts, self.score)
        return i2t if self.direction == "i2t" else self.attend(texts, images, self.score).T + i2t

    def score(self, tile: Tile) -> Tensor:
        return query_mean(self.relevance(tile)[0], tile)

    def relevance(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Cosine [Q, N, C] of each fragment with its context, and the weights [Q, N, C, K].

        The paper divides the remaining weights by their sum; the cosine ignores that factor. The
        norms get no epsilon, unlike in SCAN: it would make equal weights differ, and `focus`
        would drop the lower ones.
        """
        attention = F.normalize(leaky(tile.sims_QNCK), dim=1, eps=EPS)
        weights = masked_softmax(self.lambda_softmax * attention, tile.key_mask_CK)
        weights = focus(weights, tile.key_mask_CK, self.focal)
        return packed_cosine(tile.sims_QNCK, weights, tile.gram_CKK, tile.norms_QN), weights

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.direction != "t2i":
            return None
        tile, to_padded = one_pair(text, image)
        relevance, weights = self.relevance(tile)
        effect = relevance[0, :, 0] / max(1, relevance.shape[1])
        attention = weights[0, :, 0] / weights[0, :, 0].sum(-1, keepdim=True).clamp(min=1e-8)
        return WordParts.from_effects(effect, attention, to_padded)
