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
from counterfoil.models.model import Model

IMAGE_BYTES = 1 << 30
"""Room for the encoded images of one block."""

MOST_IMAGES = 1 << 14
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
        self.model, self.split, self.table = model, split, split.require_fragments()
        self.size = size or _images_at_once(model, self.table)
        self.skipped: dict[int, str] = {}
        self._only: ImageBlock | None = None

    def __len__(self) -> int:
        return -(-len(self.split) // self.size)

    def __iter__(self) -> Iterator[ImageBlock]:
        return (block for _, block in self.numbered())

    def numbered(self, first: int = 0) -> Iterator[tuple[int, ImageBlock]]:
        """Blocks from the ``first`` on, with their numbers; one without readable images is none."""
        for number in range(first, len(self)):
            block = self._only or self._encode(number)
            if len(self) == 1:
                self._only = block
            if block is not None:
                yield number, block

    def readable(self, image: int) -> bool:
        try:
            self.table.read(image)
        except DataError:
            return False
        return True

    @torch.inference_mode()
    def _encode(self, number: int) -> ImageBlock | None:
        wanted = range(len(self.split))[number * self.size : (number + 1) * self.size]
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


def caption_blocks(texts: Sequence[str], captions: Sequence[int]) -> list[list[int]]:
    """Some hundred captions at a time, shortest first: little is padded where lengths are alike."""
    by_length = sorted(captions, key=lambda caption: len(texts[caption].split()))
    return [by_length[start : start + BATCH] for start in range(0, len(by_length), BATCH)]


def _images_at_once(model: Model, table: FragmentTable) -> int:
    vectors = 1 if model.matcher.needs == "pooled" else table.max_fragments + 1
    each = 4 * model.spec.embed_size * vectors * model.spec.copies
    return max(1, min(MOST_IMAGES, IMAGE_BYTES // each))
