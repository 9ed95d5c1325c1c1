"""Poolings in which fragments see each other: ESA's channels and HREM's relations.

External-space attention (ESA, Zhu et al. 2023) lets every channel attend on its own. HREM's
relations add what a pooled vector owes to fragments seeing each other.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.encoders.layers import xavier_linear
from counterfoil.encoders.pooling import KMaxPooling, MeanPooling, poolings


@poolings.register("channel-attention")
class ChannelAttention(nn.Module):
    """Weighted mean with weights of its own for every channel (ESA).

    A linear layer scores all channels of a fragment at once; each channel's weights are the softmax
    of its scores over the real fragments. ``dropout`` acts on the fragments before they are scored,
    where ESA with BERT has it.
    """

    def __init__(self, dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.score = xavier_linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        padding = ~mask[..., None]
        fragments = self.dropout(fragments.masked_fill(padding, 0.0))
        weights = self.score(fragments).masked_fill(padding, -1e4).softmax(1)
        return (weights.masked_fill(padding, 0.0) * fragments).sum(1)


def relation_layer(dim: int, heads: int, dropout: float, where: str) -> nn.TransformerEncoderLayer:
    """A post-norm transformer layer, no wider inside; ``heads=0`` is 16, or what ``dim`` allows."""
    if heads and dim % heads:
        raise ConfigError(f"{where}: {heads} heads do not divide an embed_size of {dim}")
    heads = heads or math.gcd(16, dim)
    return nn.TransformerEncoderLayer(dim, heads, dim, dropout, batch_first=True)


@poolings.register("relations")
class RelationPooling(nn.Module):
    """HREM: mean of the k largest values, and the mean after a transformer layer (Fu et al. 2023).

    ``residual`` is the share of the former. ``form="reference"`` lowers k for good at the first
    item of a batch with fewer fragments than k, as the public code does: there the vector of an
    item depends on those before it.
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
        related = self.relate(fragments, src_key_padding_mask=ignored)
        largest = self._largest(fragments, mask)
        pooled: Tensor = self.residual * largest + (1 - self.residual) * self.mean(related, mask)
        return pooled

    def _largest(self, fragments: Tensor, mask: Tensor) -> Tensor:
        if self.form == "paper":
            top: Tensor = self.largest(fragments, mask)
            return top
        lowered = mask.sum(1).clamp(min=1, max=self.k).cummin(0).values  # [B], k item by item
        pools = [
            KMaxPooling(fragments.shape[-1], k=k)(fragments, mask) for k in range(1, self.k + 1)
        ]
        return torch.stack(pools)[lowered - 1, torch.arange(mask.shape[0], device=mask.device)]
