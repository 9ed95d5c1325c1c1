"""CHAN: cross-modal hard aligning (Pan, Wu, Zhang 2023). A word counts by its best region."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.registry import refuse_unused
from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import Tile, masked_softmax, packed_cosine
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher, WordParts, one_pair
from counterfoil.matchers.scan import aggregate

Coding = Literal["vha", "tha", "vsa"]
Pooling = Literal["lse", "mean", "max", "sum", "softmax"]


@matchers.register("chan")
class CHAN(CrossAttentionMatcher):
    """CHAN: hard assignment of each word to its most similar region, then pooling over words.

    ``coding``: "vha" assigns words to regions, "tha" regions to words. "vsa" is the soft form of
    "tha": the cosine of a region with its attended words at temperature ``alpha``. ``pooling`` is
    over words (vha) or regions (tha, vsa); "lse" is β log Σ exp(s/β).

    ``form="reference"`` omits the factor β, as the public code does: scores are 1/β times as large,
    so margins have another scale. An item without fragments scores zero.
    """

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        coding: Coding = "vha",
        pooling: Pooling = "lse",
        beta: float = 0.1,
        alpha: float = 0.1,
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__(embed_size)
        self.coding, self.pooling = coding, pooling
        self.beta, self.alpha, self.form = beta, alpha, form
        if coding != "vsa":
            refuse_unused(CHAN, "model.matcher", f"coding={coding}", alpha=alpha)
        if pooling not in ("lse", "softmax"):
            refuse_unused(CHAN, "model.matcher", f"pooling={pooling}", beta=beta)

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        if self.coding != "vha":
            return ()
        plain = self.form == "paper" or self.pooling != "lse"
        return (
            KernelSpec(
                "chan",
                pooling=self.pooling,
                lse_scale=1 / self.beta,
                factor=1.0 if plain else 1 / self.beta,
            ),
        )

    def torch_scores(self, images: Encoded, texts: Encoded) -> Tensor:
        if self.coding == "vha":
            return self.attend(texts, images, self.score).T
        return self.attend(images, texts, self.score)

    def score(self, tile: Tile) -> Tensor:
        """Scores [Q, C], pooled over query fragments."""
        sims, mask = self._fragment_scores(tile), tile.query_mask(3)  # [Q, N, C]
        if self.pooling == "softmax":
            return (masked_softmax(sims / self.beta, mask, 1) * sims).sum(1)
        score = aggregate(sims, mask, self.pooling, lambda_lse=1 / self.beta, dim=1)
        if self.pooling == "lse" and self.form == "reference":
            score = score / self.beta
        if tile.key_mask_CK is not None:
            score = score.masked_fill(~tile.key_mask_CK.any(1), 0.0)
        return score

    def _fragment_scores(self, tile: Tile) -> Tensor:
        """Score [Q, N, C] of each query fragment: hard or soft assignment."""
        if self.coding != "vsa":
            return max_similarity(tile)
        weights = masked_softmax(tile.sims_QNCK / self.alpha, tile.key_mask_CK)
        return packed_cosine(tile.sims_QNCK, weights, tile.gram_CKK, tile.norms_QN)

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.coding != "vha" or self.pooling not in ("mean", "sum"):
            return None
        tile, to_padded = one_pair(text, image)
        sims = tile.sims_QNCK[0, :, 0]  # [W, R]
        effect = max_similarity(tile)[0, :, 0]
        effect = effect / max(1, len(effect)) if self.pooling == "mean" else effect
        best_region = F.one_hot(sims.argmax(1), sims.shape[1]).to(sims.dtype)
        return WordParts.from_effects(effect, best_region, to_padded)


def max_similarity(tile: Tile) -> Tensor:
    """Largest similarity [Q, N, C] of each query fragment; zero for an item without keys."""
    best = tile.masked_sims(-torch.inf).amax(-1)
    mask = tile.key_mask_CK
    return best if mask is None else best.masked_fill(~mask.any(1), 0.0)
