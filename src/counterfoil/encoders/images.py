"""Image encoders over fragments: linear projection, MLPs, self-attention, a transformer block."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.distributed import gather_counts, world_size
from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.core.tensors.modes import attention_without_cudnn
from counterfoil.data.batches.collate import ImageBatch
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.layers import (
    FragmentBatchNorm,
    JointSpace,
    linear_before_norm,
    xavier_linear,
)
from counterfoil.encoders.pooling import Pooling

image_encoders: Registry[type[ImageEncoder]] = Registry("image encoder")

Form = Literal["paper", "reference"]


class ImageEncoder(nn.Module):
    """Fragments [B, N, input_dim] to the joint space."""

    def __init__(
        self, input_dim: int, embed_size: int, pooling: Pooling, normalize: bool, absolute: bool
    ) -> None:
        super().__init__()
        self.joint = JointSpace(embed_size, pooling, normalize, absolute)

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def pads_as_global_batch(self) -> bool:
        """Whether encoding is a collective operation: it asks all processes for their padding."""
        return False

    def forward(self, images: ImageBatch) -> Encoded:
        encoded: Encoded = self.joint(self.project(images.fragments, images.mask), images.mask)
        return encoded


class Bottleneck(nn.Module):
    """Linear – BN – ReLU – Linear (– BN): the two-layer MLP of VSE∞ and of SelHN's figure 9."""

    def __init__(
        self, inputs: int, hidden: int, outputs: int, final_norm: bool, count_padding: bool
    ) -> None:
        super().__init__()
        self.narrow = nn.Linear(inputs, hidden)
        self.norm = FragmentBatchNorm(hidden, count_padding)
        self.widen = nn.Linear(hidden, outputs)
        self.final_norm = FragmentBatchNorm(outputs, count_padding) if final_norm else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        narrow = self.norm(linear_before_norm(self.narrow, self.norm, x), mask)
        x = linear_before_norm(self.widen, self.final_norm, torch.relu(narrow))
        return x if self.final_norm is None else self.final_norm(x, mask)


@image_encoders.register("fc")
class ProjectionEncoder(ImageEncoder):
    """One linear layer (VSE++, SCAN, VSE (FC)); ``weight_norm`` as SCAN's option of that name."""

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        absolute: bool = False,
        weight_norm: bool = False,
    ) -> None:
        super().__init__(input_dim, embed_size, pooling, normalize, absolute)
        self.fc = xavier_linear(input_dim, embed_size)
        if weight_norm:
            nn.utils.parametrizations.weight_norm(self.fc, dim=None)  # type: ignore[arg-type]

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        projected: Tensor = self.fc(fragments)
        return projected


@image_encoders.register("mlp")
class MLPEncoder(ImageEncoder):
    """A linear layer and an MLP, or their sum.

    ``residual="none"`` is VSE (MLP): MLP(fc(x)). ``"projected"`` is RVSE: fc(x) + MLP(fc(x)).
    ``"raw"`` is VSE∞: fc(x) + MLP(x).
    ``form="reference"`` counts padding in the batch statistics, as the public code does.
    """

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        pooling: Pooling = "gpo",
        residual: Literal["none", "projected", "raw"] = "projected",
        hidden: int = 0,
        final_norm: bool = False,
        normalize: bool = True,
        absolute: bool = False,
        form: Form = "paper",
    ) -> None:
        super().__init__(input_dim, embed_size, pooling, normalize, absolute)
        self.residual = residual
        self.fc = xavier_linear(input_dim, embed_size)
        self.mlp = Bottleneck(
            input_dim if residual == "raw" else embed_size,
            hidden or embed_size // 2,
            embed_size,
            final_norm,
            count_padding=form == "reference",
        )

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        length = fragments.shape[1]
        if self.pads_as_global_batch:
            fragments, mask = _pad_as_all(fragments, mask)
        projected: Tensor = self.fc(fragments)
        deep: Tensor = self.mlp(fragments if self.residual == "raw" else projected, mask)
        projected = deep if self.residual == "none" else projected + deep
        return projected[:, :length]

    @property
    def pads_as_global_batch(self) -> bool:
        return self.mlp.norm.count_padding and self.training and world_size() > 1


def _pad_as_all(fragments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Padded to the longest image of the global batch, for forms in which padding counts."""
    missing = max(gather_counts(mask.shape[1], mask.device)) - mask.shape[1]
    return F.pad(fragments, (0, 0, 0, missing)), F.pad(mask, (0, missing))


class RegionAttention(nn.MultiheadAttention):
    """Multi-head self-attention over the regions of an image (CHAN, Pan et al. 2023).

    ``heads=0``: 8 as published, or the largest power of two below 8 that divides the width.
    """

    def __init__(self, dim: int, heads: int) -> None:
        if heads and dim % heads:
            raise ConfigError(
                f"model.image.heads: {heads} heads do not divide an embed_size of {dim}"
            )
        super().__init__(dim, heads or math.gcd(8, dim), batch_first=True)

    def within_images(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention to the real regions of the same image."""
        # an image without regions has nothing to attend to; its softmax must not be empty
        ignored = ~mask & mask.any(1, keepdim=True)
        with attention_without_cudnn():
            attended: Tensor = self(x, x, x, key_padding_mask=ignored, need_weights=False)[0]
        return attended

    def across_images(self, x: Tensor) -> Tensor:
        """Attention to the regions of the same index in the batch, padding included."""
        x = x.transpose(0, 1)
        with attention_without_cudnn():
            attended: Tensor = self(x, x, x, need_weights=False)[0]
        return attended.transpose(0, 1)


class QuickMLP(nn.Module):
    """Linear, quick GELU x·sigmoid(1.702 x), linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        narrowed: Tensor = self.narrow(x * torch.sigmoid(1.702 * x))
        return narrowed


@image_encoders.register("self-attention")
class SelfAttentionEncoder(ImageEncoder):
    """A linear layer, then x + MHA(LN(x)) over the regions (CHAN with BiGRU).

    ``form="reference"`` attends to padding as well, as the public code does.
    """

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        pooling: Pooling = "none",
        heads: int = 0,
        normalize: bool = True,
        absolute: bool = False,
        form: Form = "paper",
    ) -> None:
        super().__init__(input_dim, embed_size, pooling, normalize, absolute)
        self.form = form
        self.fc = xavier_linear(input_dim, embed_size)
        self.norm = nn.LayerNorm(embed_size)
        self.attention = RegionAttention(embed_size, heads)

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        length = fragments.shape[1]
        if self.pads_as_global_batch:
            fragments, mask = _pad_as_all(fragments, mask)
        if self.form == "reference":
            mask = torch.ones_like(mask)
        x: Tensor = self.fc(fragments)
        return (x + self.attention.within_images(self.norm(x), mask))[:, :length]

    @property
    def pads_as_global_batch(self) -> bool:
        return self.form == "reference" and self.training and world_size() > 1


@image_encoders.register("transformer")
class TransformerEncoder(ImageEncoder):
    """A linear layer, then a pre-norm transformer block over the regions (CHAN's other option).

    ``form="reference"`` attends across the batch, to the same region index of every image, as the
    public code does. The encoding of an image then depends on the rest of its batch, so that form
    trains in one process.
    """

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        pooling: Pooling = "none",
        heads: int = 0,
        normalize: bool = True,
        absolute: bool = False,
        form: Form = "paper",
    ) -> None:
        super().__init__(input_dim, embed_size, pooling, normalize, absolute)
        self.form = form
        self.fc = xavier_linear(input_dim, embed_size)
        self.norm = nn.LayerNorm(embed_size)
        self.attention = RegionAttention(embed_size, heads)
        self.mlp_norm = nn.LayerNorm(embed_size)
        self.mlp = QuickMLP(embed_size, 4 * embed_size)

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        x: Tensor = self.fc(fragments)
        normed = self.norm(x)
        if self.form == "reference":
            if self.training and world_size() > 1:
                raise ConfigError(
                    "model.image.form=reference: the image encoder 'transformer' attends to all "
                    "images of a batch, so it trains in one process; use form=paper, or start one"
                )
            x = x + self.attention.across_images(normed)
        else:
            x = x + self.attention.within_images(normed, mask)
        deep: Tensor = self.mlp(self.mlp_norm(x))
        return x + deep
