"""The image encoder of VSRN (Li et al. 2019)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from counterfoil.data.batches import ImageBatch
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.joint import xavier_linear
from counterfoil.encoders.norms import FragmentBatchNorm
from counterfoil.encoders.reasoning import LastState, Relations


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
        normalise: bool = True,
        absolute: bool = False,
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__(input_dim, embed_size, "none", normalise, absolute)
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
