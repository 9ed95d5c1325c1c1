"""VSRN's semantic reasoning (Li et al. 2019): graph convolution over fragments, then a GRU.

The image encoder of VSRN and the text side of VSRN++ are made of these parts.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from counterfoil.data.batches.collate import ImageBatch
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.encoders.images import Form, ImageEncoder, image_encoders
from counterfoil.encoders.layers import FragmentBatchNorm, linear_before_norm, xavier_linear
from counterfoil.encoders.pooling import MeanPooling, poolings
from counterfoil.encoders.texts import run_rnn, states_at_end


class RelationLayer(nn.Module):
    """One step of graph convolution over fully connected fragments, with a residual.

    The affinity of two fragments is θ(x)·φ(y) / N without softmax; N is the number of real
    fragments. The step starts as the identity, as its batch norm starts with weight and bias zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.norm = FragmentBatchNorm(dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        phi = self.phi(x).masked_fill(~mask[..., None], 0.0)
        affinity = self.theta(x) @ phi.transpose(1, 2) / mask.sum(1).clamp(min=1)[:, None, None]
        out = linear_before_norm(self.out, self.norm, affinity @ self.g(x))
        update: Tensor = self.norm(out, mask)
        return x + update


class Relations(nn.Module):
    """Several relation layers, then unit length.

    ``over_fragments`` divides each channel by its length over the fragments of an item, as the
    public code does, instead of each fragment by its length over the channels.
    """

    def __init__(self, dim: int, layers: int, over_fragments: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RelationLayer(dim) for _ in range(layers))
        self.over_fragments = over_fragments

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Related fragments [B, N, D]; zero at padding."""
        padding = ~mask[..., None]
        x = x.masked_fill(padding, 0.0)
        for layer in self.layers:
            x = layer(x, mask)
        return self.unit(x.masked_fill(padding, 0.0))

    def unit(self, x: Tensor) -> Tensor:
        """Unit length along the chosen axis; padding must be zero."""
        if self.over_fragments:
            return l2_normalize(x.transpose(1, 2)).transpose(1, 2)
        return l2_normalize(x)


class LastState(nn.GRU):
    """A GRU over the fragments, real ones first; returns the state after the last real one.

    The state of an item without fragments is zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, batch_first=True)

    def read(self, fragments: Tensor, mask: Tensor) -> Tensor:
        states = run_rnn(self, fragments.to(next(self.parameters()).dtype), mask)
        return states_at_end(states, mask).masked_fill(~mask.any(1, keepdim=True), 0.0)


@poolings.register("reasoning")
class ReasoningPooling(nn.Module):
    """Graph convolution over the fragments, then their mean or the last state of a GRU (VSRN++).

    No code of VSRN++ is public. We assume that its text side mirrors VSRN's image side: projected
    word states pass the same number of relation layers, are normalized and read by a GRU.
    With ``readout="mean"``, the order of the fragments does not matter.
    """

    def __init__(
        self, dim: int, *, layers: int = 4, readout: Literal["mean", "gru"] = "mean"
    ) -> None:
        super().__init__()
        self.relations = Relations(dim, layers)
        self.mean = MeanPooling(dim)
        self.rnn = LastState(dim) if readout == "gru" else None

    def forward(self, fragments: Tensor, mask: Tensor) -> Tensor:
        related: Tensor = self.relations(fragments, mask)
        if self.rnn is not None:
            return self.rnn.read(related, mask)
        pooled: Tensor = self.mean(related, mask)
        return pooled


@image_encoders.register("vsrn")
class ReasoningEncoder(ImageEncoder):
    """A linear layer, graph convolution over the regions, a GRU that reads them (VSRN).

    Fragments are the related regions; the pooled vector is the GRU's last state, which depends on
    the order of the regions. COCO's configuration sets ``unit_regions`` (normalize also before the
    graph convolution), Flickr30K's ``final_norm`` (batch norm after the GRU).
    ``form="reference"`` normalizes each channel over the regions, as the public code does, instead
    of each region over its channels.
    """

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        layers: int = 4,
        unit_regions: bool = False,
        final_norm: bool = False,
        normalize: bool = True,
        absolute: bool = False,
        form: Form = "paper",
    ) -> None:
        super().__init__(input_dim, embed_size, "none", normalize, absolute)
        self.fc = xavier_linear(input_dim, embed_size)
        self.unit_regions = unit_regions
        self.relations = Relations(embed_size, layers, over_fragments=form == "reference")
        self.rnn = LastState(embed_size)
        self.norm = FragmentBatchNorm(embed_size) if final_norm else None

    def project(self, fragments: Tensor, mask: Tensor) -> Tensor:
        projected: Tensor = self.fc(fragments)
        if self.unit_regions:
            projected = self.relations.unit(projected.masked_fill(~mask[..., None], 0.0))
        related: Tensor = self.relations(projected, mask)
        return related

    def forward(self, images: ImageBatch) -> Encoded:
        related = self.project(images.fragments, images.mask)
        whole = self.rnn.read(related, images.mask)
        if self.norm is not None:
            whole = self.norm(whole, images.mask.any(1))
        return Encoded(related, images.mask, self.joint.finish(whole))
