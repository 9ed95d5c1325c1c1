"""Matchers of whole vectors: cosine, and the order of order embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.encoders.encoded import HALVES, Encoded
from counterfoil.matchers.base import Matcher, matchers, pooled


@matchers.register("cosine")
class Cosine(Matcher):
    """Inner product of the pooled vectors, which the encoders bring to unit length.

    In mixed precision it is taken in single precision: bfloat16 has two cosines near 1 differ by
    0.004 or not at all, and a model whose vectors are all alike could not learn to tell them apart.
    """

    needs = "pooled"

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        of_images, of_texts = pooled(images, "image"), pooled(texts, "text")
        device = of_images.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return _single(of_images) @ _single(of_texts).T
        return of_images @ of_texts.T


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


@matchers.register("order")
class Order(Matcher):
    """Order embeddings: −‖max(0, text − image)‖, zero where the image entails the text."""

    needs = "pooled"
    rows = 64  # images at a time: the difference is [rows, n_texts, D]

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        of_images, of_texts = pooled(images, "image"), pooled(texts, "text")
        parts = [
            -torch.linalg.vector_norm((of_texts[None] - block[:, None]).clamp(min=0), dim=-1)
            for block in of_images.split(self.rows)
        ]
        return torch.cat(parts)
