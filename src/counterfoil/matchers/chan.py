"""CHAN: cross-modal hard aligning (Pan, Wu, Zhang 2023). A word is worth its best region."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.registry import refuse_unused
from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import Tile, key_softmax, masked_softmax, packed_cosine
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher, WordParts, one_pair
from counterfoil.matchers.scan import aggregate

Coding = Literal["vha", "tha", "vsa"]
Pooling = Literal["lse", "mean", "max", "sum", "softmax"]


@matchers.register("chan")
class CHAN(CrossAttentionMatcher):
    """CHAN: hard assignment of each word to its most similar region, then pooling over words.

    ``coding``: "vha" assigns words to regions, "tha" regions to words; "vsa" is the soft form of
    the latter, the cosine of a region with the words it attends to at temperature ``alpha``. What
    is coded is pooled over the words (vha) or regions (tha, vsa); "lse" is β log Σ exp(s/β).

    ``form="reference"`` leaves out the factor β, as the public code does: scores, and with them
    the meaning of a margin, are 1/β times as large. An item without fragments scores zero.
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
        """One score [Q, C] from what each query fragment found."""
        coded, mask = self._coded(tile), tile.query_mask_QNC  # [Q, N, C]
        if self.pooling == "softmax":
            logits = coded / self.beta
            weights = logits.softmax(1) if mask is None else masked_softmax(logits, mask, 1)
            return (weights * coded).sum(1)
        score = aggregate(coded, mask, self.pooling, lambda_lse=1 / self.beta, dim=1)
        if self.pooling == "lse" and self.form == "reference":
            score = score / self.beta
        if tile.key_mask_CK is not None:
            score = score.masked_fill(~tile.key_mask_CK.any(1), 0.0)
        return score

    def _coded(self, tile: Tile) -> Tensor:
        if self.coding != "vsa":
            return highest(tile)
        weights = key_softmax(tile.sims_QNCK / self.alpha, tile.key_mask_CK)
        return packed_cosine(tile.sims_QNCK, weights, tile.gram_CKK, tile.norms_QN)

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.coding != "vha" or self.pooling not in ("mean", "sum"):
            return None
        tile, place = one_pair(text, image)
        sims = tile.sims_QNCK[0, :, 0]  # [W, R]
        effect = highest(tile)[0, :, 0]
        effect = effect / max(1, len(effect)) if self.pooling == "mean" else effect
        looked = F.one_hot(sims.argmax(1), sims.shape[1]).to(sims.dtype)
        return WordParts(
            place(effect.clamp(min=0)), place(effect.clamp(max=0)), place(looked), additive=True
        )


def highest(tile: Tile) -> Tensor:
    """Largest similarity [Q, N, C] of each query fragment; zero where nothing answers."""
    if tile.key_mask_CK is None:
        return tile.sims_QNCK.amax(-1)
    best = tile.sims_QNCK.masked_fill(~tile.key_mask_CK, -torch.inf).amax(-1)
    return best.masked_fill(~tile.key_mask_CK.any(1), 0.0)
