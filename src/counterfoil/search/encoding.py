"""Images and captions as an index keeps them: for its matcher, and for another model before it.

A cross-encoder has nothing that could find a shortlist: its words and regions meet in the pair. A
faster model's vectors then stand where a matcher of whole vectors has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from counterfoil.data.batches import ImageBatch
from counterfoil.encoders import Encoded
from counterfoil.errors import ConfigError
from counterfoil.evaluation.scoring import encode_texts
from counterfoil.models.model import Model
from counterfoil.models.word_spans import known_text
from counterfoil.search.proxy import pooled_vectors


@dataclass(frozen=True)
class ItemEncoder:
    """Encodes with the model of an index and, where there is one, with its first stage's."""

    model: Model
    first: Model | None = None

    def texts(self, texts: Sequence[str]) -> Encoded:
        """Encoded sentences, each without the words that the model at work does not know."""
        encoded = encode_texts(self.model, _known(self.model, texts))
        if self.first is None:
            return encoded
        return _beside(encoded, self.first, encode_texts(self.first, _known(self.first, texts)))

    @torch.inference_mode()
    def images(self, batch: ImageBatch) -> Encoded:
        """Encoded images, with their boxes for explanations."""
        batch = batch.to(self.model.device)
        encoded = self.model.encode_images(batch)
        if encoded.fragments is not None and encoded.mask.shape == batch.mask.shape:
            encoded = replace(encoded, boxes=batch.boxes)
        if self.first is None:
            return encoded
        return _beside(encoded, self.first, self.first.encode_images(batch.to(self.first.device)))


def _known(model: Model, texts: Sequence[str]) -> list[str]:
    return [known_text(model.text, text).text for text in texts]


def _beside(encoded: Encoded, first: Model, other: Encoded) -> Encoded:
    vectors = torch.from_numpy(pooled_vectors(first, other).rows)
    return replace(encoded, pooled=vectors.to(encoded.mask.device))


def check_first(model: Model, first: Model) -> None:
    """Refuse two models that cannot search together, with the reason."""
    if model.matcher.needs != "fragments":
        raise ConfigError(
            f"the model '{model.spec.name}' compares whole vectors, which are its own first stage: "
            "leave --first out"
        )
    if first.matcher.needs != "pooled":
        raise ConfigError(
            f"--first: the model '{first.spec.name}' has no whole vectors to find a shortlist "
            "with; name a run of a model that compares them, such as vse-infty or rvse-mlp"
        )
    reads = [(m.fragments_from, m.fragments_options, m.input_dim) for m in (model, first)]
    if reads[0] != reads[1]:
        raise ConfigError(
            f"--first: '{first.spec.name}' reads fragments of "
            f"'{first.fragments_from or 'precomputed features'}' ({first.input_dim} numbers), "
            f"'{model.spec.name}' those of '{model.fragments_from or 'precomputed features'}' "
            f"({model.input_dim} numbers): train both on the same features"
        )
