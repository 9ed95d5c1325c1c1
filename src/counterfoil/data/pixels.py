"""Images as fragments that are read anew each time: the patches of their pixels, undiminished.

A network that learns from pixels cuts a picture into square patches. Taken as fragments, these
travel through batches, evaluation and search like any other features; nothing is kept but the
images themselves, and every reading may see another part of a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.images import ImageRef, open_image


@dataclass(frozen=True)
class PixelAugmentation:
    """How a training item looks at a picture.

    A part of random proportions with at least ``crop`` of its area (1: the whole, as in tests),
    and, with ``flip``, every second time mirrored.
    """

    crop: float = 1.0
    flip: bool = False

    def __bool__(self) -> bool:
        return self.crop < 1.0 or self.flip


class PatchReader(Protocol):
    """Turns a decoded picture into its patches [n, dim] of bytes, with their boxes."""

    @property
    def dim(self) -> int: ...

    @property
    def max_fragments(self) -> int: ...

    def extract(self, image: Image.Image) -> Fragments: ...

    def augment(
        self, image: Image.Image, pixel_augmentation: PixelAugmentation, rng: np.random.Generator
    ) -> Fragments: ...


class PictureRows:
    """Patches of images as rows of bytes [n, dim]; a row is decoded when it is asked for."""

    dtype = np.dtype(np.uint8)

    def __init__(self, refs: Sequence[ImageRef], reader: PatchReader) -> None:
        self.refs, self.reader = refs, reader

    @property
    def path(self) -> Path:
        return Path("pixels")

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.refs), self.reader.max_fragments, self.reader.dim

    def __len__(self) -> int:
        return len(self.refs)

    def row(self, index: int) -> NDArray[Any]:
        return self.reader.extract(open_image(self.refs[index])).features

    def rows(self, indices: Sequence[int]) -> NDArray[Any]:
        return np.stack([self.row(int(index)) for index in indices])


@dataclass(frozen=True)
class PixelTable(FragmentTable):
    """A `FragmentTable` of `PictureRows`: features are bytes, and are never stored."""

    def __post_init__(self) -> None:
        self._rows()

    @classmethod
    def of(cls, refs: Sequence[ImageRef], reader: PatchReader, made_by: str) -> PixelTable:
        rows = np.arange(len(refs), dtype=np.int64)
        return cls(PictureRows(refs, reader), rows, made_by=made_by)

    def read(self, image: int) -> Fragments:
        """The patches of one image; `DataError` where it cannot be decoded."""
        rows = self._rows()
        return rows.reader.extract(open_image(rows.refs[int(self.rows[image])]))

    def compact(self, image: int) -> Fragments:
        """Bytes are as compact as they get."""
        return self.read(image)

    def augment(
        self, image: int, pixel_augmentation: PixelAugmentation, rng: np.random.Generator
    ) -> Fragments:
        """The patches of one image as a training item sees it."""
        rows = self._rows()
        return rows.reader.augment(
            open_image(rows.refs[int(self.rows[image])]), pixel_augmentation, rng
        )

    def _rows(self) -> PictureRows:
        if not isinstance(self.features, PictureRows):
            raise TypeError("a PixelTable reads its rows from images")
        return self.features
