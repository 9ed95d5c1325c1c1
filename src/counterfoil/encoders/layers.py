"""Layers that encoders share: Xavier-initialized linear, joint space, masked batch norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.distributed import sum_over_processes
from counterfoil.core.tensors.host_mirror import known_unpadded
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.encoders.pooling import Pooling, create_pooling


def xavier_linear(inputs: int, outputs: int) -> nn.Linear:
    """Uniform in ±√6/√(in+out), bias zero: the initialization of all public implementations."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def linear_before_norm(layer: nn.Linear, norm: nn.Module | None, x: Tensor) -> Tensor:
    """``layer(x)`` for a batch norm over its rows, with the exact gradient of the bias: zero.

    In training the norm subtracts the mean, and with it the bias. Autograd would add up rounding
    errors instead, which Adam scales up to full updates: the bias would take a random walk, and
    with it the running mean, differently for every number of processes.
    """
    if norm is None or not norm.training:
        return layer(x)
    return F.linear(x, layer.weight, layer.bias.detach() + 0.0 * layer.bias)


class JointSpace(nn.Module):
    """The last step of every encoder: pool the fragments and normalize to unit length.

    With ``pooling="none"``, for matchers that read fragments, each fragment is normalized instead.
    ``absolute`` takes absolute values: order embeddings are non-negative.
    """

    def __init__(
        self, embed_size: int, pooling: Pooling, normalize: bool = True, absolute: bool = False
    ) -> None:
        super().__init__()
        self.pool = create_pooling(pooling, embed_size)
        self.normalize, self.absolute = normalize, absolute

    def forward(self, fragments: Tensor, mask: Tensor) -> Encoded:
        pooled = self.finish(self.pool(fragments, mask)) if self.pool is not None else None
        if self.pool is None:
            fragments = self.finish(fragments)
        if not known_unpadded(mask):
            fragments = fragments.masked_fill(~mask[..., None], 0.0)
        return Encoded(fragments, mask, pooled)

    def finish(self, x: Tensor) -> Tensor:
        x = l2_normalize(x) if self.normalize else x
        return x.abs() if self.absolute else x


class FragmentBatchNorm(nn.BatchNorm1d):
    """BatchNorm of fragments [B, N, D] with statistics of the real ones, over all processes.

    With ``count_padding``, the zero rows of padding enter the statistics, as in the public code.
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
        centered = (wide - mean) * rows
        variance = sum_over_processes(centered.square().flatten(0, -2).sum(0)) / count
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
