"""Images as callers have them, files, pictures, pixels or fragments, as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from counterfoil.core.errors import ArgumentError, ConfigError, DataError
from counterfoil.data.fragments import Fragments
from counterfoil.data.images import FileImage, open_image, to_upright_rgb
from counterfoil.features.extractors import Extractor, extractors

ImageLike: TypeAlias = "str | PathLike[str] | Image.Image | Fragments | NDArray[Any] | Tensor"
"""A file, a picture, pixels [height, width, 3] (uint8), or fragments [n, D] (floats)."""


class ImageReader:
    """Reads images with the extractor whose fragments a model was trained on."""

    def __init__(self, extractor: str | None, options: dict[str, Any], dim: int) -> None:
        self.name, self.options, self.dim = extractor, options, dim
        self._extractor: Extractor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes an extractor of its own: those that run ONNX cannot be copied."""
        return {**self.__dict__, "_extractor": None}

    @property
    def extractor(self) -> Extractor:
        if self.name is None:
            raise ConfigError(
                "this model was trained on precomputed features, so it cannot read pixels; give "
                "fragments of the same kind, or train on images"
            )
        if self._extractor is None:
            self._extractor = extractors.create(self.name, self.options)
        return self._extractor

    def fragments(self, image: ImageLike) -> Fragments:
        return self.read(image)[0]

    def read(self, image: ImageLike) -> tuple[Fragments, Image.Image | None]:
        """Fragments of an image, and its pixels if it was given as such."""
        if isinstance(image, Fragments):
            return image, None
        if isinstance(image, (np.ndarray, Tensor)) and not _is_pixels(image):
            return self._given(_to_numpy(image)), None
        extractor = self.extractor
        picture = open_picture(image)
        return extractor.extract(picture), picture

    def _given(self, features: NDArray[Any]) -> Fragments:
        if features.ndim != 2 or features.shape[1] != self.dim or features.dtype.kind != "f":
            raise ArgumentError(
                f"image: expected fragments [n, {self.dim}] (floats) or pixels [height, width, 3] "
                f"(uint8), got {features.dtype} {list(features.shape)}"
            )
        if not len(features) or not np.isfinite(features).all():
            raise DataError("image: expected at least one fragment, all numbers finite")
        return Fragments(features.astype(np.float32, copy=False))


def open_picture(image: str | PathLike[str] | Image.Image | NDArray[Any] | Tensor) -> Image.Image:
    """Upright RGB of a file, a picture or pixels."""
    if isinstance(image, (str, PathLike)):
        return open_image(FileImage(Path(image)))
    if isinstance(image, Image.Image):
        return to_upright_rgb(image)
    if isinstance(image, (np.ndarray, Tensor)):
        return Image.fromarray(_to_numpy(image))
    raise ArgumentError(
        "image: expected a path, a PIL image, pixels, or fragments, got " + type(image).__name__
    )


def _to_numpy(array: NDArray[Any] | Tensor) -> NDArray[Any]:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else array


def _is_pixels(array: NDArray[Any] | Tensor) -> bool:
    return array.ndim == 3 and array.shape[2] == 3 and str(array.dtype).endswith("uint8")


def as_list(given: Any, what: str) -> list[Any]:
    """One item or several, as a list; a batch of fragments [images, n, D] is several."""
    if isinstance(given, (str, PathLike, Image.Image, Fragments)):
        return [given]
    if isinstance(given, (np.ndarray, Tensor)):
        single = given.ndim == 2 or _is_pixels(given)
        return [given] if single else list(given)
    if not isinstance(given, Sequence):
        given = list(given)
    if not len(given):
        raise ArgumentError(f"{what}: expected at least one, got none")
    return list(given)
