"""Preprocessing of images for networks: resize, crop, normalize, and keep track of boxes.

Only Pillow is needed; the processors of `transformers` need torchvision for most networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError

Box = tuple[float, float, float, float]
Size = tuple[int, int]
WHOLE_IMAGE: Box = (0.0, 0.0, 1.0, 1.0)
_MIN_SIDE = 32

Fit = Literal["squash", "crop", "within"]

# Of pixels in 0…1; the default for networks that state none.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_LARGEST_SIDE = 4096
_GRID_TOLERANCE = 2e-3
"""Largest difference of a box from its cell; half precision keeps three digits."""


@dataclass(frozen=True)
class View:
    """Pixels [H, W, 3] and their box in the image (x1, y1, x2, y2 in 0…1)."""

    pixels: NDArray[np.uint8]
    box: Box = WHOLE_IMAGE


def squash(image: Image.Image, size: Size, filter: int, box: Box = WHOLE_IMAGE) -> View:
    """Resize the image, or a box of it, to ``size`` (height, width), ignoring the aspect ratio.

    Nothing is cropped, so everything that a caption may mention stays visible.
    """
    width, height = image.size
    # a box covers at least one pixel, however small the image
    x1, y1 = min(box[0] * width, width - 1), min(box[1] * height, height - 1)
    x2, y2 = max(box[2] * width, x1 + 1), max(box[3] * height, y1 + 1)
    small = image.convert("RGB").resize(
        (size[1], size[0]), Image.Resampling(filter), box=(x1, y1, x2, y2)
    )
    return View(np.asarray(small), box)


def center_crop(image: Image.Image, size: Size, resized: int, filter: int) -> View:
    """Resize the shorter side to ``resized``, then crop the center, as CLIP does.

    Only the crop is resized, so a strip of 5000 by 3 pixels costs no more than other images.
    """
    scale = resized / min(image.size)
    width, height = image.width * scale, image.height * scale
    w, h = min(size[1] / width, 1.0), min(size[0] / height, 1.0)
    return squash(image, size, filter, ((1 - w) / 2, (1 - h) / 2, (1 + w) / 2, (1 + h) / 2))


def fit_within(image: Image.Image, shorter: int, longer: int, filter: int) -> View:
    """Resize with the aspect ratio kept: the shorter side, and at most ``longer`` for the other."""
    scale = min(shorter / min(image.size), longer / max(image.size))
    width, height = (max(_MIN_SIDE, round(side * scale)) for side in image.size)
    return squash(image, (height, width), filter)


def boxes_in_image(boxes: NDArray[np.float32], window: Box) -> NDArray[np.float32]:
    """Boxes relative to a view's box as boxes relative to the image.

    >>> boxes_in_image(np.array([[0.0, 0.5, 1.0, 1.0]], np.float32), (0.5, 0.0, 1.0, 1.0)).tolist()
    [[0.5, 0.5, 1.0, 1.0]]
    """
    origin = np.array([*window[:2], *window[:2]], dtype=np.float32)
    size = np.array([window[2] - window[0], window[3] - window[1]] * 2, dtype=np.float32)
    return np.clip(origin + boxes * size, 0, 1).astype(np.float32)


def grid_boxes(rows: int, columns: int) -> NDArray[np.float32]:
    """Boxes [rows · columns, 4] of the cells of a grid, row by row.

    >>> grid_boxes(1, 2).tolist()
    [[0.0, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, 1.0]]
    """
    y, x = np.divmod(np.arange(rows * columns), columns)
    corners = np.stack([x, y, x + 1, y + 1], axis=1)
    return (corners / np.array([columns, rows] * 2)).astype(np.float32)


@dataclass(frozen=True)
class Grid:
    """Boxes that are the cells of a grid; ``cells`` has the index of each cell, row by row.

    ``box`` is the part of the image that the grid covers.
    """

    rows: int
    columns: int
    box: Box
    cells: tuple[int, ...]


def find_grid(boxes: NDArray[np.float32]) -> Grid | None:
    """The grid whose cells are the boxes, in any order; None if they are other regions.

    One more box, that of all cells together, is allowed: the fragment of the whole view.

    >>> find_grid(grid_boxes(2, 3)).cells
    (0, 1, 2, 3, 4, 5)
    >>> find_grid(np.array([[0, 0, 0.5, 1], [0.2, 0, 1, 1]], np.float32)) is None
    True
    """
    boxes = np.asarray(boxes, dtype=np.float64)
    if len(boxes) < 2 or not np.isfinite(boxes).all():
        return None
    frame = np.array([*boxes[:, :2].min(axis=0), *boxes[:, 2:].max(axis=0)])
    cells = np.flatnonzero(np.abs(boxes - frame).max(axis=1) > _GRID_TOLERANCE)
    if not len(cells) or len(boxes) - len(cells) > 1:
        return None
    sides = (frame[2:] - frame[:2]) / (boxes[cells[0], 2:] - boxes[cells[0], :2] + 1e-9)
    columns, rows = (max(1, round(float(side))) for side in sides)
    if rows * columns != len(cells):
        return None
    expected = frame[[0, 1, 0, 1]] + grid_boxes(rows, columns) * np.tile(frame[2:] - frame[:2], 2)
    distances = np.abs(boxes[cells][None] - expected[:, None]).max(axis=2)
    order = distances.argmin(axis=1)
    if distances.min(axis=1).max() > _GRID_TOLERANCE or len(set(order)) < len(cells):
        return None
    x1, y1, x2, y2 = frame.tolist()
    return Grid(rows, columns, (x1, y1, x2, y2), tuple(int(cells[at]) for at in order))


def crop_boxes(scales: Sequence[float]) -> list[Box]:
    """Windows of each scale, overlapping by half or more, the largest scale first.

    >>> len(crop_boxes([1.0])), len(crop_boxes([0.5]))
    (1, 9)
    """
    boxes: list[Box] = []
    for scale in sorted(scales, reverse=True):
        count = int(np.ceil((1 - scale) / (scale / 2) - 1e-9)) + 1
        starts = np.linspace(0, 1 - scale, count)
        boxes += [
            (float(x), float(y), float(min(x + scale, 1)), float(min(y + scale, 1)))
            for y in starts
            for x in starts
        ]
    return boxes


@dataclass(frozen=True)
class Preprocessing:
    """Size, resampling and normalization; ``mean`` and ``std`` in pixel values, 0…255.

    ``size`` is (height, width). For ``fit="crop"``, ``resized`` is the shorter side before the
    cut; for ``fit="within"``, ``size`` is (shorter, longest) side.
    """

    size: Size
    fit: Fit = "squash"
    resized: int = 0
    filter: int = int(Image.Resampling.BICUBIC)
    mean: tuple[float, ...] = tuple(255 * value for value in IMAGENET_MEAN)
    std: tuple[float, ...] = tuple(255 * value for value in IMAGENET_STD)

    def __post_init__(self) -> None:
        if not all(1 <= side <= _LARGEST_SIDE for side in self.size):
            raise ConfigError(f"size {self.size}: expected 1…{_LARGEST_SIDE} pixels per side")
        if len(self.mean) != 3 or len(self.std) != 3 or 0 in self.std:
            raise ConfigError(
                f"mean {self.mean}, std {self.std}: expected three numbers each, std not zero"
            )

    def view(self, image: Image.Image) -> View:
        if self.fit == "crop":
            return center_crop(image, self.size, self.resized, self.filter)
        if self.fit == "within":
            return fit_within(image, *self.size, self.filter)
        return squash(image, self.size, self.filter)


def read_preprocessing(
    stated: dict[str, Any], natural: Any, fit: Literal["squash", "crop"], side: int | None
) -> Preprocessing:
    """From a `preprocessor_config.json`; ``natural`` is the network's image size."""
    resized = _size(stated.get("size")) or _size(natural) or (224, 224)
    size = (side, side) if side else _size(stated.get("crop_size")) or resized
    shorter = max(min(resized), min(size))
    return Preprocessing(size, fit, shorter, _filter(stated), *_normalization(stated))


def read_detection(stated: dict[str, Any], side: int | None) -> Preprocessing:
    """The same for a detector: the aspect ratio is kept unless the file states one size."""
    named = stated.get("size")
    sizes = named if isinstance(named, dict) else {}
    if "height" in sizes and not side:
        size = _size(sizes) or (800, 1333)
        return Preprocessing(size, "squash", 0, _filter(stated), *_normalization(stated))
    shorter = int(side or sizes.get("shortest_edge") or 800)
    longer = int(sizes.get("longest_edge") or 1333)
    size = (shorter, max(shorter, longer))
    return Preprocessing(size, "within", 0, _filter(stated), *_normalization(stated))


def _size(value: Any) -> Size | None:
    """Height and width, from any notation of a size; None if there is none."""
    if isinstance(value, dict):
        value = value.get("shortest_edge") or (value.get("height"), value.get("width"))
    if isinstance(value, int):
        return value, value
    if isinstance(value, list | tuple) and len(value) == 2 and all(value):
        return int(value[0]), int(value[1])
    return None


def _filter(stated: dict[str, Any]) -> int:
    value = stated.get("resample")
    known = [int(member) for member in Image.Resampling]
    return value if value in known else int(Image.Resampling.BICUBIC)


def _normalization(stated: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    factor = stated.get("rescale_factor") or 1 / 255
    unit = 1 / factor if stated.get("do_rescale", True) else 1.0
    if not stated.get("do_normalize", True):
        return (0.0,) * 3, (unit,) * 3
    mean, std = stated.get("image_mean") or IMAGENET_MEAN, stated.get("image_std") or IMAGENET_STD
    return tuple(unit * float(m) for m in mean), tuple(unit * float(s) for s in std)
