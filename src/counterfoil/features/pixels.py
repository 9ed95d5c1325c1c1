"""The extractor "pixels": a picture as its patches, for networks that learn from pixels."""

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
from counterfoil.features.views import WHOLE_IMAGE, Box, Preprocessing, View, place, squash

_TRIES = 10
_MAX_ASPECT = 4 / 3


@extractors.register("pixels")
class Pixels:
    """Patches of the pixels themselves, for models that are trained end to end (CLIP, SigLIP).

    ``model`` is the dual encoder that says how it wants its pictures: size, patches, what is cut
    off. What it says may be given instead, or changed: ``size`` and ``patch`` are sides in pixels,
    ``resized`` the shorter side before a crop, ``filter`` Pillow's number of a resampling (bicubic
    where neither says).
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
                "pixels: name a model that says how it sees (model=FOLDER or a hub's name), or "
                "give size and patch"
            )
        if model:
            stated = dual_settings(model, size)
            given = stated.preprocessing
            self.patch = patch or stated.patch
            self.preprocessing = replace(
                given,
                fit=given.fit if fit == "own" else fit,
                resized=resized or given.resized,
                filter=given.filter if filter is None else filter,
            )
        else:
            way: Literal["squash", "crop"] = "squash" if fit == "own" else fit
            self.patch = patch
            number = int(Image.Resampling.BICUBIC) if filter is None else filter
            self.preprocessing = Preprocessing((size, size), way, resized or size, number)
        if not 1 <= self.patch <= self.side:
            raise ConfigError(f"pixels: patches of {self.patch} in pictures of {self.side} pixels")

    @property
    def side(self) -> int:
        return self.preprocessing.size[0]

    @property
    def dim(self) -> int:
        return 3 * self.patch**2

    @property
    def max_fragments(self) -> int:
        return (self.side // self.patch) ** 2

    def described(self) -> str:
        """Name and options in one line, which need no other file to be understood."""
        wanted = self.preprocessing
        options: dict[str, Any] = {
            "size": self.side,
            "patch": self.patch,
            "fit": wanted.fit,
            "resized": wanted.resized,
            "filter": wanted.filter,
        }
        return full_name(self.name, options)

    def fingerprint(self) -> str:
        return self.described()

    def extract(self, image: Image.Image) -> Fragments:
        return self._patches(self.preprocessing.view(image))

    def augment(
        self, image: Image.Image, pixel_augmentation: PixelAugmentation, rng: np.random.Generator
    ) -> Fragments:
        """Patches of a random part of the picture, mirrored every second time where asked."""
        if pixel_augmentation.crop < 1.0:
            part = random_part(image.size, pixel_augmentation.crop, rng)
            view = squash(image, self.preprocessing.size, self.preprocessing.filter, part)
        else:
            view = self.preprocessing.view(image)
        return self._patches(view, mirrored=pixel_augmentation.flip and bool(rng.random() < 0.5))

    def _patches(self, view: View, mirrored: bool = False) -> Fragments:
        pixels = view.pixels[:, ::-1] if mirrored else view.pixels
        boxes = self._grid
        if mirrored:  # what is seen on the left is on the right of the picture
            boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], axis=1)
        return Fragments(to_patches(pixels, self.patch), place(boxes, view.box))

    @cached_property
    def _grid(self) -> NDArray[np.float32]:
        """Boxes within a view; what is left over at its right and lower edge is in no patch."""
        count = self.side // self.patch
        y, x = np.divmod(np.arange(count**2), count)
        corners = np.stack([x, y, x + 1, y + 1], axis=1) * self.patch
        return (corners / self.side).astype(np.float32)


def to_patches(pixels: NDArray[np.uint8], patch: int) -> NDArray[np.uint8]:
    """Square patches [n, patch · patch · 3] of a picture [H, W, 3], row by row."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    cut = pixels[: rows * patch, : columns * patch].reshape(rows, patch, columns, patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 1, 3, 4)).reshape(rows * columns, -1)


def random_part(size: tuple[int, int], least: float, rng: np.random.Generator) -> Box:
    """A part of a picture (width, height) with ``least`` to all of its area, near to a square.

    Proportions are drawn between 3:4 and 4:3 evenly in their logarithm. Where no such part fits in
    a few tries (a panorama), it is the whole.
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
