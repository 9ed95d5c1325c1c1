"""External-space attention (ESA, Zhu et al. 2023): every channel attends on its own."""

from __future__ import annotations

from torch import Tensor, nn

from counterfoil.encoders.joint import xavier_linear
from counterfoil.encoders.pooling import poolings


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
