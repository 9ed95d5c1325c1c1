"""The images and captions of a split, encoded a block at a time: memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from counterfoil.data.batches import pad_fragments
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.evaluation.scoring import encode_texts
from counterfoil.models.model import Model

IMAGE_BYTES = 1 << 30
"""Room for the encoded images of one block."""

MOST_IMAGES = 1 << 14
SCORES = 1 << 24
"""Scores held at once, at most."""

BATCH = 256


@dataclass(frozen=True)
class ImageBlock:
    """Some encoded images; ``images`` are their indices into the split."""

    encoded: Encoded
    images: list[int]


class ImageBlocks:
    """The readable images of a split; iterating encodes them, block by block.

    A split that fits into one block is encoded once, however often it is gone through. ``skipped``
    says, after the first time, which images could not be read.
    """

    def __init__(self, model: Model, split: Split, size: int | None = None) -> None:
        if split.fragments is None:
            raise DataError(f"split '{split.name}' has no fragments; extract features first")
        self.model, self.split, self.table = model, split, split.fragments
        self.size = size or _images_at_once(model, split.fragments)
        self.skipped: dict[int, str] = {}
        self._only: ImageBlock | None = None

    def __len__(self) -> int:
        return -(-len(self.split) // self.size)

    def __iter__(self) -> Iterator[ImageBlock]:
        if self._only is not None:
            yield self._only
            return
        for start in range(0, len(self.split), self.size):
            block = self._encode(range(start, min(start + self.size, len(self.split))))
            if block is None:
                continue
            if len(self) == 1:
                self._only = block
            yield block

    @torch.inference_mode()
    def _encode(self, wanted: range) -> ImageBlock | None:
        parts: list[Encoded] = []
        kept: list[int] = []
        for start in range(0, len(wanted), BATCH):
            items: list[Fragments] = []
            for image in wanted[start : start + BATCH]:
                try:
                    items.append(self.table.read(image))
                    kept.append(image)
                except DataError as error:
                    self.skipped[image] = f"image {self.split.ids[image]}: {error}"
            if items:
                batch = pad_fragments(items).to(self.model.device)
                parts.append(self.model.encode_images(batch))
        return ImageBlock(Encoded.cat(parts), kept) if parts else None


def caption_blocks(
    model: Model, texts: Sequence[str], captions: Sequence[int], images: int
) -> Iterator[tuple[Encoded, list[int]]]:
    """Encoded captions, as many at once as may be scored against so many images."""
    size = max(1, min(4 * BATCH, SCORES // max(1, images)))
    for start in range(0, len(captions), size):
        block = list(captions[start : start + size])
        yield encode_texts(model, [texts[caption] for caption in block]), block


def _images_at_once(model: Model, table: FragmentTable) -> int:
    vectors = 1 if model.matcher.needs == "pooled" else table.max_fragments + 1
    each = 4 * model.spec.embed_size * vectors * model.spec.copies
    return max(1, min(MOST_IMAGES, IMAGE_BYTES // each))
