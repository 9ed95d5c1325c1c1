"""Large batches in little memory: what is encoded is kept, how it was encoded is done twice.

A batch of B pairs gives every anchor B − 1 negatives, but what an encoder remembers of B items for
its backward pass is many times what it makes of them. So items are encoded a chunk at a time and
only the result is kept. All pairs are scored, the loss is taken, and its gradient reaches the
encoded items: the cache. Then each chunk is encoded once more, with the same random numbers, and
the cached gradient goes through it to the weights. Chunks do not see each other, so the sum of
their gradients is the gradient of the whole batch.

The second encoding is part of the backward pass itself. Hence a loss may use the encoded items as
it likes, gradients are accumulated, scaled and averaged over processes as ever, and every objective
works as it does without chunks.
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
from counterfoil.encoders.recurrent import cuda_graphs
from counterfoil.models.model import Model

B = TypeVar("B", ImageBatch, TextBatch)


class GradientCache:
    """A model's encoders, ``chunk_size`` items at a time; 0: all at once.

    An encoder that normalises over its batch is not cut: its items do see each other.
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
        """Which sides cannot be cut, for the log of a run."""
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
            [_remade(encode, part, needs) for part in chunks(batch, self.chunk_size)]
        )


def _remade(encode: Callable[[B, Needs | None], Encoded], part: B, needs: Needs | None) -> Encoded:
    """One chunk, encoded again in the backward pass instead of remembered."""
    if not torch.is_grad_enabled():
        return encode(part, needs)

    def run(_: Tensor) -> Encoded:
        with cuda_graphs(False):  # the second time is another thread's, which would not replay
            return encode(part, needs)

    # the tensor says on which device random numbers are to be repeated
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
    """Whether what it makes of an item depends on the others: batch statistics, now in training."""
    return any(isinstance(part, _BatchNorm) and part.training for part in encoder.modules())
