"""Matchers of whole vectors: cosine, and the order of order embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.base import Matcher, matchers, pooled


@matchers.register("cosine")
class Cosine(Matcher):
    """Inner product of the pooled vectors, which the encoders bring to unit length."""

    needs = "pooled"

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        return pooled(images, "image") @ pooled(texts, "text").T


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
