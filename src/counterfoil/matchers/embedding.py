"""Matchers of pooled vectors: cosine similarity, and order embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.spec import ScoringJob
from counterfoil.matchers.base import Matcher, matchers, pooled
from counterfoil.matchers.fragment_matcher import single, single_precision


@matchers.register("cosine")
class Cosine(Matcher):
    """Inner product of the pooled vectors, which the encoders normalize to unit length.

    In mixed precision it is computed in single precision (`fragment_matcher`).
    """

    needs = "pooled"

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        image_vectors, text_vectors = pooled(images, "image"), pooled(texts, "text")
        with single_precision(image_vectors.device) as was_mixed:
            if was_mixed:
                image_vectors, text_vectors = single(image_vectors), single(text_vectors)
            return image_vectors @ text_vectors.T


@matchers.register("order")
class Order(Matcher):
    """Order embeddings: −‖max(0, text − image)‖, zero if the image entails the text."""

    needs = "pooled"
    rows = 64  # images at a time: the difference is [rows, n_texts, D]

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        image_vectors, text_vectors = pooled(images, "image"), pooled(texts, "text")
        if torch.is_autocast_enabled(image_vectors.device.type):
            image_vectors, text_vectors = single(image_vectors), single(text_vectors)
        parts = [
            -torch.linalg.vector_norm((text_vectors[None] - block[:, None]).clamp(min=0), dim=-1)
            for block in image_vectors.split(self.rows)
        ]
        return torch.cat(parts)
