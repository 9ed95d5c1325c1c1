"""Gradient caching: large batches in little memory, by encoding in chunks and twice.

A batch of B pairs gives every anchor B − 1 negatives, but the activations of an encoder for its
backward pass take many times the memory of its output. So items are encoded in chunks and only the
outputs are kept. The loss over all pairs gives a gradient at the outputs: the cache. Each chunk is
then encoded again, with the same random numbers, and the cached gradient is propagated to the
weights. Chunks are independent, so their gradients sum to the gradient of the whole batch.

The second encoding is part of the backward pass. So losses may use the encoded items freely, and
gradient accumulation, scaling, averaging over processes and all objectives work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from counterfoil.core.tensors.host_mirror import rows_of
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.encoders import Encoded
from counterfoil.encoders.encoded import Needs
from counterfoil.encoders.images import ImageEncoder
from counterfoil.encoders.recurrent import cuda_graphs
from counterfoil.models.model import Model

B = TypeVar("B", ImageBatch, TextBatch)


class GradientCache:
    """A model's encoders, ``chunk_size`` items at a time; 0 means all at once.

    An encoder with batch normalization is not chunked: its items depend on each other. In several
    processes, an encoder that pads as the global batch is not chunked either.
    """

    def __init__(self, model: Model, chunk_size: int = 0) -> None:
        self.model, self.chunk_size = model, chunk_size

    def images(self, images: ImageBatch, needs: Needs | None = None) -> Encoded:
        """As `Model.encode_images`."""
        return self._encode(self.model.encode_images, self.model.image_encoder, images, needs)

    def texts(self, texts: TextBatch, needs: Needs | None = None) -> Encoded:
        """As `Model.encode_texts`."""
        return self._encode(self.model.encode_texts, self.model.text_encoder, texts, needs)

    def whole(self) -> list[str]:
        """Sides that cannot be chunked, for the log of a run."""
        sides = {"image": self.model.image_encoder, "text": self.model.text_encoder}
        return [name for name, encoder in sides.items() if mixes_items(encoder)]

    def _encode(
        self,
        encode: Callable[[B, Needs | None], Encoded],
        encoder: nn.Module,
        batch: B,
        needs: Needs | None,
    ) -> Encoded:
        if not 0 < self.chunk_size < len(batch.mask) or mixes_items(encoder):
            return encode(batch, needs)
        return Encoded.cat(
            [_recomputed(encode, part, needs) for part in chunks(batch, self.chunk_size)]
        )


def _recomputed(
    encode: Callable[[B, Needs | None], Encoded], part: B, needs: Needs | None
) -> Encoded:
    """One chunk, encoded again in the backward pass instead of storing activations."""
    if not torch.is_grad_enabled():
        return encode(part, needs)

    def run(_: Tensor) -> Encoded:
        with cuda_graphs(False):  # the backward pass is in another thread, which cannot replay
            return encode(part, needs)

    # `checkpoint` restores the random state of the device of its tensor argument
    encoded: Encoded = checkpoint(run, part.mask, use_reentrant=False)
    return encoded


def chunks(batch: B, size: int) -> Iterator[B]:
    """The items of a batch, ``size`` at a time."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    for start in range(0, len(batch.mask), size):
        rows = slice(start, start + size)
        yield replace(
            batch, **{k: rows_of(x, rows) for k, x in tensors.items() if isinstance(x, Tensor)}
        )


def mixes_items(encoder: nn.Module) -> bool:
    """Whether an encoder needs its whole batch at once, in training mode.

    Batch statistics are over all items. Padding as the global batch is a collective operation, and
    processes with unequal shares have unequal numbers of chunks.
    """
    return any(
        (isinstance(part, _BatchNorm) and part.training)
        or (isinstance(part, ImageEncoder) and part.pads_as_global_batch)
        for part in encoder.modules()
    )
