"""Extractor "pixels": the patches of an image, for networks that train on pixels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError
from counterfoil.data.fragments import Fragments, PixelAugmentation
from counterfoil.features.extractors import extractors, full_name
from counterfoil.features.pretrained import dual_settings
from counterfoil.features.views import WHOLE_IMAGE, Box, Preprocessing, View, boxes_in_image, squash

_TRIES = 10
_MAX_ASPECT = 4 / 3


@extractors.register("pixels")
class Pixels:
    """Patches of pixels, for models that are trained end to end (CLIP, SigLIP).

    ``model`` is the dual encoder whose preprocessing is used: size, patches, crop. The other
    options replace parts of it, or all: ``size`` and ``patch`` are sides in pixels, ``resized`` is
    the shorter side before a crop, ``filter`` Pillow's number of a resampling (default: bicubic).
    """

    name: ClassVar[str] = "pixels"

    def __init__(
        self,
        *,
        model: str = "",
        size: int = 0,
        patch: int = 0,
        fit: Literal["own", "squash", "crop"] = "own",
        resized: int = 0,
        filter: int | None = None,
    ) -> None:
        if not model and not (size and patch):
            raise ConfigError(
                "pixels: name a model whose preprocessing to use (model=NAME, a local folder or a "
                "name on the hub), or give size and patch"
            )
        if model:
            settings = dual_settings(model, size)
            own, self.patch = settings.preprocessing, patch or settings.patch
        else:
            own, self.patch = Preprocessing((size, size), "squash", size), patch
        self.preprocessing = replace(
            own,
            fit=own.fit if fit == "own" else fit,
            resized=resized or own.resized,
            filter=own.filter if filter is None else filter,
        )
        if not 1 <= self.patch <= self.side:
            raise ConfigError(
                f"pixels: patch {self.patch}, size {self.side}: expected a patch of at least 1 "
                "pixel, not larger than the picture"
            )

    @property
    def side(self) -> int:
        return self.preprocessing.size[0]

    @property
    def dim(self) -> int:
        return 3 * self.patch**2

    @property
    def max_fragments(self) -> int:
        return (self.side // self.patch) ** 2

    def description(self) -> str:
        """The full name with all options, which does not depend on the files of a model."""
        own = self.preprocessing
        options: dict[str, Any] = {
            "size": self.side,
            "patch": self.patch,
            "fit": own.fit,
            "resized": own.resized,
            "filter": own.filter,
        }
        return full_name(self.name, options)

    def fingerprint(self) -> str:
        return self.description()

    def extract(self, image: Image.Image) -> Fragments:
        return self._patches(self.preprocessing.view(image))

    def augment(
        self, image: Image.Image, pixel_augmentation: PixelAugmentation, rng: np.random.Generator
    ) -> Fragments:
        """Patches of a random crop; with ``flip``, mirrored with probability 1/2."""
        if pixel_augmentation.crop < 1.0:
            part = random_part(image.size, pixel_augmentation.crop, rng)
            view = squash(image, self.preprocessing.size, self.preprocessing.filter, part)
        else:
            view = self.preprocessing.view(image)
        return self._patches(view, mirrored=pixel_augmentation.flip and bool(rng.random() < 0.5))

    def _patches(self, view: View, mirrored: bool = False) -> Fragments:
        pixels = view.pixels[:, ::-1] if mirrored else view.pixels
        boxes = self._grid
        if mirrored:  # boxes refer to the original image
            boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], axis=1)
        return Fragments(to_patches(pixels, self.patch), boxes_in_image(boxes, view.box))

    @cached_property
    def _grid(self) -> NDArray[np.float32]:
        """Boxes of the patches in a view; pixels left over at the right and bottom are dropped."""
        count = self.side // self.patch
        y, x = np.divmod(np.arange(count**2), count)
        corners = np.stack([x, y, x + 1, y + 1], axis=1) * self.patch
        return (corners / self.side).astype(np.float32)


def to_patches(pixels: NDArray[np.uint8], patch: int) -> NDArray[np.uint8]:
    """Square patches [n, patch · patch · 3] of an image [H, W, 3], row by row."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    cut = pixels[: rows * patch, : columns * patch].reshape(rows, patch, columns, patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 1, 3, 4)).reshape(rows * columns, -1)


def random_part(size: tuple[int, int], least: float, rng: np.random.Generator) -> Box:
    """The box of a random crop with a share of the area from ``least`` to 1.

    The aspect ratio is log-uniform between 3:4 and 4:3. If no such crop fits after a few tries (a
    panorama), the result is the whole image.
    """
    width, height = size
    for _ in range(_TRIES):
        area = rng.uniform(least, 1.0) * width * height
        proportion = _MAX_ASPECT ** rng.uniform(-1.0, 1.0)
        w, h = math.sqrt(area * proportion) / width, math.sqrt(area / proportion) / height
        if w <= 1 and h <= 1:
            x, y = rng.uniform(0, 1 - w), rng.uniform(0, 1 - h)
            return x, y, x + w, y + h
    return WHOLE_IMAGE
