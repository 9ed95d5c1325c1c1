"""Matchers of whole vectors: cosine, and the order of order embeddings."""

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

    In mixed precision it is taken in single precision (`fragment_matcher`).
    """

    needs = "pooled"

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        of_images, of_texts = pooled(images, "image"), pooled(texts, "text")
        with single_precision(of_images.device) as was_mixed:
            if was_mixed:
                of_images, of_texts = single(of_images), single(of_texts)
            return of_images @ of_texts.T


@matchers.register("order")
class Order(Matcher):
    """Order embeddings: −‖max(0, text − image)‖, zero where the image entails the text."""

    needs = "pooled"
    rows = 64  # images at a time: the difference is [rows, n_texts, D]

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        of_images, of_texts = pooled(images, "image"), pooled(texts, "text")
        if torch.is_autocast_enabled(of_images.device.type):
            of_images, of_texts = single(of_images), single(of_texts)
        parts = [
            -torch.linalg.vector_norm((of_texts[None] - block[:, None]).clamp(min=0), dim=-1)
            for block in of_images.split(self.rows)
        ]
        return torch.cat(parts)
