"""Batch normalisation over the real fragments of all processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterfoil.collectives import sum_over_processes


class FragmentBatchNorm(nn.BatchNorm1d):
    """BatchNorm of fragments [B, N, D] that counts real fragments only, on every process alike.

    With ``count_padding`` the zero rows of padding enter the statistics, as in the public code.
    """

    def __init__(self, dim: int, count_padding: bool = False) -> None:
        super().__init__(dim)
        self.count_padding = count_padding

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert self.running_mean is not None  # noqa: S101 - tracking is always on here
        assert self.running_var is not None  # noqa: S101
        if not self.training:
            return self._scale(x, self.running_mean, self.running_var)
        if mask is None or self.count_padding:
            mask = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        wide = x if x.dtype == torch.float64 else x.float()
        rows = mask[..., None].to(wide.dtype)
        count = sum_over_processes(rows.sum())
        mean = sum_over_processes((wide * rows).flatten(0, -2).sum(0)) / count
        centred = (wide - mean) * rows
        variance = sum_over_processes(centred.square().flatten(0, -2).sum(0)) / count
        with torch.no_grad():
            momentum = self.momentum if self.momentum is not None else 0.1
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return self._scale(x, mean, variance)

    def _scale(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return x * scale.to(x.dtype) + shift.to(x.dtype)
