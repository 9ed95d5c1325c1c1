"""Poolings of fragments to one vector: mean, max, k-max, attention, GPO, ESA and HREM.

Every pooling takes fragments [B, N, D] and mask [B, N] and ignores padding. An item without
fragments pools to zero.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.core.tensors.modes import attention_without_cudnn, is_exporting
from counterfoil.encoders.recurrent import (
    Indices,
    captured_width,
    cuda_graphs,
    cuda_graphs_enabled,
    run_gru,
    run_padded,
)

poolings: Registry[type[nn.Module]] = Registry("pooling")

MAX_FIXED_LENGTH = 128
"""With CUDA graphs, GPO computes the weights of every length if no item is longer than this."""

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
        total = fragments.masked_fill(~mask[..., None], 0.0).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=1)


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
    """Mean of the k largest values of each channel (of all values if there are fewer)."""

    def __init__(self, dim: int, *, k: int = 5) -> None:
        super().__init__()
        self.k = k

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        if is_exporting():  # the exported graph must be valid for any number of fragments
            fragments = F.pad(fragments, (0, 0, 0, self.k))
            mask = F.pad(mask, (0, self.k))
        k = self.k if is_exporting() else min(self.k, fragments.shape[1])
        top = fragments.masked_fill(~mask[..., None], -torch.inf).topk(k, dim=1).values
        counts = mask.sum(1, keepdim=True).clamp(max=k)  # [B, 1]
        real = torch.arange(k, device=mask.device)[None] < counts  # [B, k]
        return top.masked_fill(~real[..., None], 0.0).sum(1) / counts.clamp(min=1)


@poolings.register("attention")
class AttentionPooling(nn.Module):
    """Weighted mean; the weights are the softmax of a learned score per fragment."""

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
    """Generalized pooling operator of VSE∞: learned weights over the sorted values of a channel.

    The weights depend only on the number of fragments, so they are computed once per distinct
    length in a batch.
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
        ordered = _descending(fragments.masked_fill(~mask[..., None], -torch.inf))
        real = torch.arange(mask.shape[1], device=mask.device)[None] < mask.sum(1, keepdim=True)
        values = ordered.masked_fill(~real[..., None], 0.0)
        return torch.einsum("bn,bnd->bd", weights, values)

    def weights(self, lengths: Indices, longest: int) -> Tensor:
        """Pooling weights [B, longest] of items of the given lengths; zero beyond a length."""
        weight = self.linear.weight
        graphed = cuda_graphs_enabled() and longest <= MAX_FIXED_LENGTH and bool(lengths.all())
        if graphed:  # all lengths up to `wide`: the shape is the same in every batch
            wide = captured_width(longest)
            distinct, index = np.arange(1, wide + 1), lengths - 1
        else:
            wide = longest
            distinct, index = np.unique(lengths, return_inverse=True)
        positions = _positions(wide, self.d_pe, weight.device).to(weight.dtype)
        with cuda_graphs(graphed):
            hidden = run_gru(self.gru, positions.expand(len(distinct), -1, -1), distinct)
        outside = _to_device(np.arange(wide) >= distinct[:, None], weight.device)
        weights = self._softmax(hidden, outside)  # [U, wide]
        if not distinct.all():  # an item without fragments has no weights
            weights = weights.masked_fill(_to_device(distinct == 0, weight.device)[:, None], 0.0)
        return weights.index_select(0, _to_device(index, weight.device))[:, :longest]

    def padded_weights(self, lengths: Tensor, longest: int) -> Tensor:
        """The same for lengths on the device, without a host sync: one GRU pass per item."""
        positions = _positions.__wrapped__(longest, self.d_pe, lengths.device)
        positions = positions.to(self.linear.weight.dtype).expand(lengths.shape[0], -1, -1)
        hidden = run_padded(self.gru.all_weights, True, positions, lengths.clamp(min=1))
        outside = torch.arange(longest, device=lengths.device) >= lengths[:, None]
        return self._softmax(hidden, outside).masked_fill((lengths == 0)[:, None], 0.0)

    def _softmax(self, hidden: Tensor, outside: Tensor) -> Tensor:
        forward, backward = hidden.chunk(2, dim=-1)
        scores = self.linear((forward + backward) / 2).squeeze(-1)
        return (scores.masked_fill(outside, -1e4) / self.temperature).softmax(-1)


def _descending(values: Tensor) -> Tensor:
    """Each channel [B, N, D] sorted over N, the largest value first.

    Without gradients on a CPU it is sorted by NumPy, which is several times as fast as PyTorch.
    """
    trains = torch.is_grad_enabled() and values.requires_grad
    by_numpy = values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)
    if not by_numpy or trains or is_exporting() or torch.compiler.is_compiling():
        return values.sort(1, descending=True).values
    rows = np.array(values.detach().mT.numpy(), order="C")
    rows.sort(-1)
    return torch.from_numpy(rows).mT.flip(1).contiguous()


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # evaluation may fill the cache, and training reads it later
def _positions(length: int, channels: int, device: torch.device) -> Tensor:
    """Sinusoidal code of the ranks 0 … length-1: sine on even channels, cosine on odd ones."""
    rank = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    step = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    angle = rank * torch.exp(step * -(math.log(10000.0) / channels))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, channels)


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


@poolings.register("channel-attention")
class ChannelAttention(nn.Module):
    """Weighted mean with separate weights per channel: external-space attention (ESA, 2023).

    A linear layer scores all channels of a fragment; the weights of a channel are the softmax of
    its scores over the real fragments. ``dropout`` acts before scoring, as ESA uses it with BERT.
    """

    def __init__(self, dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.score = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.score.weight)
        nn.init.zeros_(self.score.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        padding = ~mask[..., None]
        fragments = self.dropout(fragments.masked_fill(padding, 0.0))
        weights = self.score(fragments).masked_fill(padding, -1e4).softmax(1)
        return (weights.masked_fill(padding, 0.0) * fragments).sum(1)


def relation_layer(dim: int, heads: int, dropout: float, where: str) -> nn.TransformerEncoderLayer:
    """A post-norm transformer layer of inner width ``dim``; ``heads=0``: gcd(16, dim) heads."""
    if heads and dim % heads:
        raise ConfigError(f"{where}: {heads} heads do not divide an embed_size of {dim}")
    heads = heads or math.gcd(16, dim)
    return nn.TransformerEncoderLayer(dim, heads, dim, dropout, batch_first=True)


@poolings.register("relations")
class RelationPooling(nn.Module):
    """HREM: mean of the k largest values, and the mean after a transformer layer (Fu et al. 2023).

    ``residual`` is the weight of the former. ``form="reference"`` copies a side effect of the
    public code: an item with fewer than k fragments lowers k for all items after it in the batch.
    """

    def __init__(
        self,
        dim: int,
        *,
        k: int = 2,
        residual: float = 0.8,
        heads: int = 0,
        dropout: float = 0.0,
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__()
        self.k, self.residual, self.form = k, residual, form
        self.largest, self.mean = KMaxPooling(dim, k=k), MeanPooling(dim)
        self.relate = relation_layer(dim, heads, dropout, "pooling.heads")

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        # an item without fragments has nothing to attend to; its softmax must not be empty
        ignored = ~mask & mask.any(1, keepdim=True)
        with attention_without_cudnn():
            related = self.relate(fragments, src_key_padding_mask=ignored)
        largest = self._largest(fragments, mask)
        pooled: Tensor = self.residual * largest + (1 - self.residual) * self.mean(related, mask)
        return pooled

    def _largest(self, fragments: Tensor, mask: Tensor) -> Tensor:
        if self.form == "paper":
            top: Tensor = self.largest(fragments, mask)
            return top
        k_B = mask.sum(1).clamp(min=1, max=self.k).cummin(0).values  # k of each item
        pools = [
            KMaxPooling(fragments.shape[-1], k=k)(fragments, mask) for k in range(1, self.k + 1)
        ]
        return torch.stack(pools)[k_B - 1, torch.arange(mask.shape[0], device=mask.device)]
