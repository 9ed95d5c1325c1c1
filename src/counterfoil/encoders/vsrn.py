"""Semantic reasoning (VSRN, Li et al. 2019): relate fragments to each other, then read them.

The image encoder of VSRN and the text side of VSRN++ are made of these parts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from counterfoil.data.batches.collate import ImageBatch
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.layers import FragmentBatchNorm, xavier_linear
from counterfoil.encoders.pooling import MeanPooling, poolings
from counterfoil.encoders.texts import run_rnn


class RelationLayer(nn.Module):
    """One step of graph convolution over fully connected fragments, with a residual.

    The affinity of two fragments is θ(x)·φ(y) / N, N being the number of real fragments; there is
    no softmax. The step starts as the identity: what it adds passes a normalisation that begins
    with weight and bias zero.
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
        added: Tensor = self.norm(self.out(affinity @ self.g(x)), mask)
        return x + added


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
        """Fragments [B, N, D], related; padding comes out as zeros."""
        padding = ~mask[..., None]
        x = x.masked_fill(padding, 0.0)
        for layer in self.layers:
            x = layer(x, mask)
        return self.unit(x.masked_fill(padding, 0.0))

    def unit(self, x: Tensor) -> Tensor:
        """Unit length along the chosen axis; padding must be zero."""
        return (
            l2_normalize(x.transpose(1, 2)).transpose(1, 2)
            if self.over_fragments
            else l2_normalize(x)
        )


class LastState(nn.GRU):
    """A GRU over the fragments, which come first in their row; the state after the last real one.

    The state of an item without fragments is zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, batch_first=True)

    def read(self, fragments: Tensor, mask: Tensor) -> Tensor:
        states = run_rnn(self, fragments.to(next(self.parameters()).dtype), mask)
        last = mask.sum(1).clamp(min=1) - 1
        state = states[torch.arange(last.shape[0], device=last.device), last]
        return state.masked_fill(~mask.any(1, keepdim=True), 0.0)


@poolings.register("reasoning")
class ReasoningPooling(nn.Module):
    """Graph convolution over the fragments, then their mean or the last state of a GRU (VSRN++).

    No code of VSRN++ is public. Assumed is that its text side mirrors VSRN's image side: word
    states, here those of BERT or of a BiGRU after their projection, take the same number of
    relation layers, come to unit length and are read by a GRU whose last state is the caption.
    With ``readout="mean"`` the order of the fragments does not matter.
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

    Fragments are the related regions, the pooled vector is the GRU's last state. Published for COCO
    with ``unit_regions`` (regions come to unit length before they are related, too), for Flickr30K
    with ``final_norm`` (batch normalisation after the GRU). The GRU reads regions in the order in
    which they come. ``form="reference"`` normalises, as the public code does, each channel over
    the regions where the paper's features have unit length over the channels.
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
        form: Literal["paper", "reference"] = "paper",
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
