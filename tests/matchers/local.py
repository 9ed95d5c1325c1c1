"""What tests of local matchers share."""

from __future__ import annotations

import torch

from counterfoil.encoders import Encoded


def mask_of(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest)[None] < lengths[:, None]


def encoded_pair(fixture, dtype: torch.dtype = torch.float32) -> tuple[Encoded, Encoded]:
    """Images and captions of a score fixture, with gradients; padding holds random values."""
    images = fixture["in.images"].to(dtype).requires_grad_()
    captions = fixture["in.captions"].to(dtype).requires_grad_()
    regions = fixture.tensors.get("in.img_lens", torch.full((len(images),), images.shape[1]))
    return (
        Encoded(images, mask_of(regions, images.shape[1])),
        Encoded(captions, mask_of(fixture["in.cap_lens"], captions.shape[1])),
    )
