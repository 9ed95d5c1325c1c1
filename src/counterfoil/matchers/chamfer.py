"""Similarity of two sets of vectors: smooth Chamfer, Chamfer, maximum, average (DivE)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.kernels.attention import Tile, query_mean
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher

Kind = Literal["smooth-chamfer", "chamfer", "max", "avg"]


@matchers.register("smooth-chamfer")
class SmoothChamfer(CrossAttentionMatcher):
    """DivE: smooth Chamfer similarity of two sets of vectors (Kim, Kim, Kwak 2023).

    "chamfer" takes the largest cosine of each vector with the other set; "smooth-chamfer" replaces
    it by log Σ exp(α cos) / α. Both average over each set, then over the two sets. α is
    ``temperature``, the public code's name; a larger α is closer to the maximum. "max" is the
    largest cosine of all (MIL), "avg" the mean of the sigmoids of all. Sets may differ in size; an
    item without vectors scores zero.
    """

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        temperature: float = 16.0,
        kind: Kind = "smooth-chamfer",
    ) -> None:
        super().__init__(embed_size)
        if temperature <= 0:
            raise ConfigError(f"model.matcher.temperature: above 0, got {temperature:g}")
        self.temperature, self.kind = temperature, kind

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        if self.kind != "smooth-chamfer":
            return ()
        return (KernelSpec("chamfer", scale=self.temperature),)

    def score(self, tile: Tile) -> Tensor:
        sims, real = tile.sims_QNCK, tile.key_mask_CK
        if sims.dtype != torch.float64:
            sims = sims.float()  # times α, rounding in half precision would exceed the differences
        if real is None:
            real = torch.ones(sims.shape[2:], dtype=torch.bool, device=sims.device)
        score = self._score(sims, real, tile)
        return score.masked_fill(~real.any(1), 0.0)

    def _score(self, sims: Tensor, real: Tensor, tile: Tile) -> Tensor:
        if self.kind == "avg":
            return _mean(query_mean(sims.sigmoid(), tile), real)
        low = torch.finfo(sims.dtype).min
        masked = sims.masked_fill(~real, low)
        if self.kind == "max":
            return _real_queries(masked, tile).amax((1, 3))
        if self.kind == "chamfer":
            largest = _real_queries(sims, tile).amax(1)
            return (query_mean(masked.amax(3), tile) + _mean(largest, real)) / 2
        logits = self.temperature * sims
        of_queries = logits.masked_fill(~real, low).logsumexp(3)  # [Q, N, C]
        of_keys = _real_queries(logits, tile).logsumexp(1)  # [Q, C, K]
        return (query_mean(of_queries, tile) + _mean(of_keys, real)) / (2 * self.temperature)


def _real_queries(values_QNCK: Tensor, tile: Tile) -> Tensor:
    """Values with those of padded query fragments at the minimum of their dtype."""
    mask = tile.query_mask(4)
    if mask is None:
        return values_QNCK
    return values_QNCK.masked_fill(~mask, torch.finfo(values_QNCK.dtype).min)


def _mean(values: Tensor, real: Tensor) -> Tensor:
    """Mean [Q, C] of values [Q, C, K] over the real keys."""
    return values.masked_fill(~real, 0.0).sum(-1) / real.sum(-1).clamp(min=1)
