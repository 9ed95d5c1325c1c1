"""Matchers of two sets of vectors: smooth Chamfer and what it is compared with (DivE)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.kernels.attention import Tile
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher

Kind = Literal["smooth-chamfer", "chamfer", "max", "avg"]


@matchers.register("smooth-chamfer")
class SmoothChamfer(CrossAttentionMatcher):
    """DivE: smooth Chamfer similarity of two sets of vectors (Kim, Kim, Kwak 2023).

    "smooth-chamfer" takes log Σ exp(α cos) / α over the other set in place of the largest cosine of
    "chamfer"; both are averaged over a set, then over the two. α is ``temperature``, as the public
    code calls it: large is sharp. "max" is the largest cosine of all (MIL), "avg" the mean of the
    sigmoid of all. Any two sizes; an item without vectors scores zero.
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
            sims = sims.float()  # sharpened, half precision would lose what tells pairs apart
        if real is None:
            real = torch.ones(sims.shape[2:], dtype=torch.bool, device=sims.device)
        score = self._score(sims, real)
        return score.masked_fill(~real.any(1), 0.0)

    def _score(self, sims: Tensor, real: Tensor) -> Tensor:
        if self.kind == "avg":
            return _mean(sims.sigmoid().mean(1), real)
        answered = sims.masked_fill(~real, torch.finfo(sims.dtype).min)
        if self.kind == "max":
            return answered.amax((1, 3))
        if self.kind == "chamfer":
            return (answered.amax(3).mean(1) + _mean(sims.amax(1), real)) / 2
        sharp = self.temperature * sims
        found = sharp.masked_fill(~real, torch.finfo(sims.dtype).min).logsumexp(3)  # [Q, N, C]
        both = found.mean(1) + _mean(sharp.logsumexp(1), real)
        return both / (2 * self.temperature)


def _mean(values: Tensor, real: Tensor) -> Tensor:
    """Mean [Q, C] of values [Q, C, K] over the real ones."""
    return values.masked_fill(~real, 0.0).sum(-1) / real.sum(-1).clamp(min=1)
