"""Fragments to one vector: mean, max, k-max mean, self-attention, and GPO.

Every pooling takes fragments [B, N, D] and mask [B, N] and ignores padding; an item without any
fragment pools to zero.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.registry import Registry
from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.encoders.recurrent import (
    Indices,
    captured_width,
    cuda_graphs,
    cuda_graphs_enabled,
    run_gru,
    run_padded,
)

poolings: Registry[type[nn.Module]] = Registry("pooling")

STEADY = 128
"""Fragments up to which GPO's weights are computed for all lengths where a graph is replayed."""

Pooling = str | dict[str, Any]
"""A pooling by name, or ``{"name": "kmax", "k": 3}``."""


def create_pooling(pooling: Pooling, dim: int, where: str = "pooling") -> nn.Module | None:
    """Build a pooling; ``"none"`` is None."""
    options = {"name": pooling} if isinstance(pooling, str) else dict(pooling)
    name = options.pop("name", "none")
    if name == "none":
        return None
    built: nn.Module = poolings.create(name, options, dim, where=where)
    return built


@poolings.register("mean")
class MeanPooling(nn.Module):
    """Average of the fragments."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        kept = fragments.masked_fill(~mask[..., None], 0.0)
        return kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


@poolings.register("max")
class MaxPooling(nn.Module):
    """Largest value of each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        top = fragments.masked_fill(~mask[..., None], -torch.inf).amax(1)
        return top.masked_fill(~mask.any(1, keepdim=True), 0.0)


@poolings.register("kmax")
class KMaxPooling(nn.Module):
    """Mean of the k largest values of each channel (of all, if there are fewer)."""

    def __init__(self, dim: int, *, k: int = 5) -> None:
        super().__init__()
        self.k = k

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        if is_exporting():  # the graph has to hold for any number of fragments
            fragments = F.pad(fragments, (0, 0, 0, self.k))
            mask = F.pad(mask, (0, self.k))
        k = self.k if is_exporting() else min(self.k, fragments.shape[1])
        top = fragments.masked_fill(~mask[..., None], -torch.inf).topk(k, dim=1).values
        counted = mask.sum(1, keepdim=True).clamp(max=k)  # [B, 1]
        real = torch.arange(k, device=mask.device)[None] < counted  # [B, k]
        return top.masked_fill(~real[..., None], 0.0).sum(1) / counted.clamp(min=1)


@poolings.register("attention")
class AttentionPooling(nn.Module):
    """Weighted mean; the weights are a softmax of a learned score of each fragment."""

    def __init__(self, dim: int, *, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or max(1, dim // 2)
        self.score = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(fragments).squeeze(-1).masked_fill(~mask, -1e4)
        weights = scores.softmax(1).masked_fill(~mask, 0.0)
        return torch.einsum("bn,bnd->bd", weights, fragments.masked_fill(~mask[..., None], 0.0))


@poolings.register("gpo")
class GPO(nn.Module):
    """Generalised pooling operator of VSE∞: learned weights over the sorted values of a channel.

    The weights depend on the number of fragments alone, so they are computed once per distinct
    length of a batch rather than once per item.
    """

    def __init__(self, dim: int, *, d_pe: int = 32, d_hidden: int = 32) -> None:
        super().__init__()
        self.d_pe = d_pe
        self.gru = nn.GRU(d_pe, d_hidden, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(d_hidden, 1, bias=False)
        self.temperature = 0.1

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        if is_exporting():
            weights = self.padded_weights(mask.sum(1), fragments.shape[1])
        else:
            weights = self.weights(host_mask(mask).sum(1), fragments.shape[1])  # [B, N]
        weights = weights.to(fragments.dtype)
        ordered = fragments.masked_fill(~mask[..., None], -torch.inf).sort(1, descending=True)
        real = torch.arange(mask.shape[1], device=mask.device)[None] < mask.sum(1, keepdim=True)
        values = ordered.values.masked_fill(~real[..., None], 0.0)
        return torch.einsum("bn,bnd->bd", weights, values)

    def weights(self, lengths: Indices, longest: int) -> Tensor:
        """Pooling weights [B, longest] of items of the given lengths; zero beyond a length."""
        weight = self.linear.weight
        steady = cuda_graphs_enabled() and longest <= STEADY and bool(lengths.all())
        if steady:  # for all lengths there are: of one shape every time
            wide = captured_width(longest)
            distinct, which = np.arange(1, wide + 1), lengths - 1
        else:
            wide = longest
            distinct, which = np.unique(lengths, return_inverse=True)
        positions = _positions(wide, self.d_pe, weight.device).to(weight.dtype)
        with cuda_graphs(steady):
            hidden = run_gru(self.gru, positions.expand(len(distinct), -1, -1), distinct)
        outside = _sent(np.arange(wide) >= distinct[:, None], weight.device)
        weights = self._softmax(hidden, outside)  # [U, wide]
        if not distinct.all():  # an item without fragments has no weights
            weights = weights.masked_fill(_sent(distinct == 0, weight.device)[:, None], 0.0)
        return weights.index_select(0, _sent(which, weight.device))[:, :longest]

    def padded_weights(self, lengths: Tensor, longest: int) -> Tensor:
        """The same for lengths that only the device knows: a pass of the GRU per item."""
        positions = _positions.__wrapped__(longest, self.d_pe, lengths.device)
        positions = positions.to(self.linear.weight.dtype).expand(lengths.shape[0], -1, -1)
        hidden = run_padded(self.gru.all_weights, True, positions, lengths.clamp(min=1))
        outside = torch.arange(longest, device=lengths.device) >= lengths[:, None]
        return self._softmax(hidden, outside).masked_fill((lengths == 0)[:, None], 0.0)

    def _softmax(self, hidden: Tensor, outside: Tensor) -> Tensor:
        forward, backward = hidden.chunk(2, dim=-1)
        scores = self.linear((forward + backward) / 2).squeeze(-1)
        return (scores.masked_fill(outside, -1e4) / self.temperature).softmax(-1)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what evaluation asked for first is trained with later
def _positions(length: int, channels: int, device: torch.device) -> Tensor:
    """Sinusoid code of the ranks 0 … length-1: sine on even channels, cosine on odd ones."""
    place = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    step = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    angle = place * torch.exp(step * -(math.log(10000.0) / channels))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, channels)


def _sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """What the host knows, on a device, without waiting for it to arrive."""
    return torch.from_numpy(array).to(device, non_blocking=True)
