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
    key_softmax,
    leaky,
    packed_cosine,
    query_mean,
)
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher, WordParts, one_pair

Focal = Literal["equal", "prob"]


def focus(weights: Tensor, mask: Tensor | None, focal: Focal) -> Tensor:
    """Attention weights (last axis) with those of irrelevant fragments set to zero.

    Fragment j is irrelevant where Σ_k (w_j − w_k) g_k < 0: it gets less attention than the others,
    these counted alike (equal, g = 1) or by their own confidence (prob, g = √w_k). Which ones are
    kept is a decision without gradient.
    """
    with torch.no_grad():
        if focal == "prob":
            trust = weights.sqrt()
        else:
            trust = torch.ones_like(weights) if mask is None else mask.to(weights.dtype)
        tie = max(TIE, 4 * torch.finfo(weights.dtype).eps)
        average = (weights * trust).sum(-1, keepdim=True)
        kept = weights * trust.sum(-1, keepdim=True) > average * (1 - tie)
    return weights.masked_fill(~kept, 0.0)


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
        of_regions = self.attend(images, texts, self.score)
        if self.direction == "i2t":
            return of_regions
        return self.attend(texts, images, self.score).T + of_regions

    def score(self, tile: Tile) -> Tensor:
        return query_mean(self.relevance(tile)[0], tile)

    def relevance(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Cosine [Q, N, C] of each fragment with what it attends to, and the weights [Q, N, C, K].

        The paper divides the weights that are left by their sum; the cosine does not notice. An
        epsilon added to the norms, as in SCAN, would set weights apart that are equal, and `focus`
        would drop the lower ones.
        """
        attention = F.normalize(leaky(tile.sims_QNCK), dim=1, eps=EPS)
        weights = key_softmax(self.lambda_softmax * attention, tile.key_mask_CK)
        weights = focus(weights, tile.key_mask_CK, self.focal)
        return packed_cosine(tile.sims_QNCK, weights, tile.gram_CKK, tile.norms_QN), weights

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.direction != "t2i":
            return None
        tile, place = one_pair(text, image)
        relevance, weights = self.relevance(tile)
        effect = relevance[0, :, 0] / max(1, relevance.shape[1])
        looked = weights[0, :, 0] / weights[0, :, 0].sum(-1, keepdim=True).clamp(min=1e-8)
        return WordParts(
            place(effect.clamp(min=0)), place(effect.clamp(max=0)), place(looked), additive=True
        )
