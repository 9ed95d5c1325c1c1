"""Image encoders over fragments: a projection, an MLP, a residual MLP."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from counterfoil.data.batches import ImageBatch
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.joint import JointSpace, xavier_linear
from counterfoil.encoders.norms import FragmentBatchNorm
from counterfoil.encoders.pooling import Pooling
from counterfoil.registry import Registry

image_encoders: Registry[type[ImageEncoder]] = Registry("image encoder")


class ImageEncoder(nn.Module):
    """Fragments [B, N, input_dim] to the joint space."""

    def __init__(
        self, input_dim: int, embed_size: int, pooling: Pooling, normalise: bool, absolute: bool
    ) -> None:
        super().__init__()
        self.joint = JointSpace(embed_size, pooling, normalise, absolute)

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError

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
        x = self.widen(torch.relu(self.norm(self.narrow(x), mask)))
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
        normalise: bool = True,
        absolute: bool = False,
        weight_norm: bool = False,
    ) -> None:
        super().__init__(input_dim, embed_size, pooling, normalise, absolute)
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
    ``"raw"`` is VSE∞: fc(x) + MLP(x), the MLP reading the feature as it comes.
    ``form="reference"`` lets padding enter the batch statistics, as the public code does.
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
        normalise: bool = True,
        absolute: bool = False,
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__(input_dim, embed_size, pooling, normalise, absolute)
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
        projected: Tensor = self.fc(fragments)
        if self.residual == "raw":
            return projected + self.mlp(fragments, mask)
        deep: Tensor = self.mlp(projected, mask)
        return deep if self.residual == "none" else projected + deep
