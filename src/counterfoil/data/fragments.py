"""Fragments of images (regions or grid cells) with their boxes, stored as array rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import RowArray


@dataclass(frozen=True)
class Fragments:
    """The fragments of one image: features [n, D] and boxes [n, 4] (x1, y1, x2, y2 in 0…1).

    Features are float32; float16 where they are read `FragmentTable.compact`; bytes where they are
    pixels.
    """

    features: NDArray[Any]
    boxes: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return int(self.features.shape[0])


@dataclass(frozen=True)
class StoredFragments:
    """The fragments of one image as stored: own dtype, own units, nothing checked."""

    features: NDArray[Any]
    boxes: NDArray[Any] | None = None
    size: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class FragmentTable:
    """Fragments of many images in `.npy` files; row ``rows[i]`` holds those of image ``i``.

    ``features`` is [N, R, D] or, for one vector an image, [N, D]; float32 or float16.
    ``lengths`` [N] says how many of the R rows are real (all, if absent). ``boxes`` [N, R, 4] are
    in pixels when ``sizes`` [N, 2] (width, height) are given, else already in 0…1. ``made_by``
    names the extractor, where it is one of ours.
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
        """How many fragments an image has."""
        return self.max_fragments if self.lengths is None else int(self.lengths[self.rows[image]])

    def select(self, images: Sequence[int]) -> FragmentTable:
        rows = self.rows[np.asarray(images, dtype=np.int64)]
        return replace(self, rows=rows)

    def read(self, image: int) -> Fragments:
        """Fragments of one image as float32; `DataError` where a value is not finite."""
        found = self.compact(image)
        return replace(found, features=found.features.astype(np.float32, copy=False))

    def compact(self, image: int) -> Fragments:
        """The same numbers as `read` gives, in half precision where that is how they are stored.

        Half the bytes to copy on their way to a GPU, where they become float32.
        """
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
        """Fragments of one image bit for bit, without padding: what conversion copies."""
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
    # by the bits without the sign, ten times as fast as NumPy asks numbers in half precision
    return bool((features.view(np.uint16) & 0x7FFF).max() < 0x7C00)
