"""Tables of image fragments (regions, grid cells or pixel patches) with their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import RowArray
from counterfoil.data.images import ImageRef, open_image


@dataclass(frozen=True)
class Fragments:
    """The fragments of one image: features [n, D] and boxes [n, 4] (x1, y1, x2, y2 in 0…1).

    Features are float32. `FragmentTable.compact` may give float16; pixels are uint8.
    """

    features: NDArray[Any]
    boxes: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return int(self.features.shape[0])


@dataclass(frozen=True)
class StoredFragments:
    """The fragments of one image as stored: original dtype and units, unchecked."""

    features: NDArray[Any]
    boxes: NDArray[Any] | None = None
    size: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class FragmentTable:
    """Fragments of many images in `.npy` files; row ``rows[i]`` holds those of image ``i``.

    ``features`` is [N, R, D] or, with one vector per image, [N, D]; float32 or float16.
    ``lengths`` [N] is the number of the R rows that are not padding (None: all). ``boxes``
    [N, R, 4] are in pixels if ``sizes`` [N, 2] (width, height) are given, else in 0…1. ``made_by``
    names the extractor if this library made the features.
    """

    features: RowArray
    rows: NDArray[np.int64]
    lengths: NDArray[np.int64] | None = None
    boxes: RowArray | None = None
    sizes: NDArray[np.float32] | None = None
    made_by: str | None = None

    def __post_init__(self) -> None:
        if len(self.features.shape) not in (2, 3) or self.features.dtype.kind != "f":
            raise DataError(
                f"{self.features.path}: expected float features [images, fragments, dim], found "
                f"{self.features.dtype} {self.features.shape}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        return int(self.features.shape[-1])

    @property
    def max_fragments(self) -> int:
        return int(self.features.shape[1]) if len(self.features.shape) == 3 else 1

    def count(self, image: int) -> int:
        """Number of fragments of an image."""
        return self.max_fragments if self.lengths is None else int(self.lengths[self.rows[image]])

    def select(self, images: Sequence[int]) -> FragmentTable:
        return replace(self, rows=self.rows[np.asarray(images, dtype=np.int64)])

    def read(self, image: int) -> Fragments:
        """Fragments of one image as float32; `DataError` if a value is not finite."""
        fragments = self.compact(image)
        return replace(fragments, features=fragments.features.astype(np.float32, copy=False))

    def compact(self, image: int) -> Fragments:
        """The same numbers as `read`, but float16 if stored so: half the bytes to copy to a GPU."""
        row = int(self.rows[image])
        features = self.features.row(row).reshape(-1, self.dim)
        if features.dtype != np.float16:
            features = features.astype(np.float32, copy=False)
        count = features.shape[0] if self.lengths is None else int(self.lengths[row])
        features = features[:count]
        if not _all_finite(features):
            bad = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
            raise DataError(f"{self.features.path}: row {row}, fragment {bad}: not a finite number")
        return Fragments(features, self._read_boxes(row, count))

    def stored(self, image: int) -> StoredFragments:
        """Fragments of one image bit for bit, without padding, for conversion."""
        row = int(self.rows[image])
        features = self.features.row(row)
        count = self.max_fragments if self.lengths is None else int(self.lengths[row])
        return StoredFragments(
            features[:count] if features.ndim == 2 else features,
            self.boxes.row(row)[:count] if self.boxes is not None else None,
            self.sizes[row] if self.sizes is not None else None,
        )

    def _read_boxes(self, row: int, count: int) -> NDArray[np.float32] | None:
        if self.boxes is None:
            return None
        boxes: NDArray[Any] = self.boxes.row(row)[:count].astype(np.float32)
        if self.sizes is not None:
            boxes = boxes / np.tile(self.sizes[row], 2)
        return boxes


def _all_finite(features: NDArray[Any]) -> bool:
    if features.dtype != np.float16 or not features.size:
        return bool(np.isfinite(features).all())
    # Exponent bits all set: inf or NaN. Ten times as fast as np.isfinite on float16.
    return bool((features.view(np.uint16) & 0x7FFF).max() < 0x7C00)


# Pixels as fragments: square patches that are decoded at each read and never stored, so that every
# read can see another crop of the image. Batches, evaluation and search treat them like features.
@dataclass(frozen=True)
class PixelAugmentation:
    """Random crop with at least ``crop`` of the area (1: none) and random ``flip`` of an image."""

    crop: float = 1.0
    flip: bool = False

    def __bool__(self) -> bool:
        return self.crop < 1.0 or self.flip


class PatchReader(Protocol):
    """Cuts a decoded image into patches [n, dim] of uint8 with their boxes."""

    @property
    def dim(self) -> int: ...

    @property
    def max_fragments(self) -> int: ...

    def extract(self, image: Image.Image) -> Fragments: ...

    def augment(
        self, image: Image.Image, pixel_augmentation: PixelAugmentation, rng: np.random.Generator
    ) -> Fragments: ...


class PictureRows:
    """Patches of images as rows [n, dim] of uint8, decoded at each access."""

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
    """A `FragmentTable` of `PictureRows`."""

    def __post_init__(self) -> None:
        self._rows()

    @classmethod
    def of(cls, refs: Sequence[ImageRef], reader: PatchReader, made_by: str) -> PixelTable:
        rows = np.arange(len(refs), dtype=np.int64)
        return cls(PictureRows(refs, reader), rows, made_by=made_by)

    def read(self, image: int) -> Fragments:
        """The patches of one image; `DataError` if it cannot be decoded."""
        return self._rows().reader.extract(self._open(image))

    def compact(self, image: int) -> Fragments:
        """The same as `read`, since patches are uint8 already."""
        return self.read(image)

    def augment(
        self, image: int, pixel_augmentation: PixelAugmentation, rng: np.random.Generator
    ) -> Fragments:
        """The patches of one image after augmentation."""
        return self._rows().reader.augment(self._open(image), pixel_augmentation, rng)

    def _open(self, image: int) -> Image.Image:
        return open_image(self._rows().refs[int(self.rows[image])])

    def _rows(self) -> PictureRows:
        if not isinstance(self.features, PictureRows):
            raise TypeError("a PixelTable reads its rows from images")
        return self.features
