"""How a published network wants its pixels, read from the file beside its weights.

Only Pillow does the work: the processors of `transformers` need torchvision for most networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from counterfoil.errors import ConfigError
from counterfoil.features.views import Size, View, centre_crop, fit_within, squash

Fit = Literal["squash", "crop", "within"]
# What ImageNet's pictures have on average, in 0…1: the custom where a network says nothing.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LARGEST_SIDE = 4096


@dataclass(frozen=True)
class Preprocessing:
    """Size, resampling and normalisation; ``mean`` and ``std`` in pixel values, 0…255.

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
            raise ConfigError(f"size {self.size}: expected 1…{_LARGEST_SIDE} pixels a side")
        if len(self.mean) != 3 or len(self.std) != 3 or 0 in self.std:
            raise ConfigError(
                f"mean {self.mean}, std {self.std}: expected three numbers each, std not zero"
            )

    def view(self, image: Image.Image) -> View:
        if self.fit == "crop":
            return centre_crop(image, self.size, self.resized, self.filter)
        if self.fit == "within":
            return fit_within(image, *self.size, self.filter)
        return squash(image, self.size, self.filter)


def read_preprocessing(
    stated: dict[str, Any], natural: Any, fit: Literal["squash", "crop"], side: int | None
) -> Preprocessing:
    """From a `preprocessor_config.json`; ``natural`` is the size the network was made for."""
    resized = _size(stated.get("size")) or _size(natural) or (224, 224)
    size = (side, side) if side else _size(stated.get("crop_size")) or resized
    shorter = max(min(resized), min(size))
    return Preprocessing(size, fit, shorter, _filter(stated), *_normalisation(stated))


def read_detection(stated: dict[str, Any], side: int | None) -> Preprocessing:
    """The same for a detector: proportions are kept unless it asks for one size."""
    named = stated.get("size")
    sizes = named if isinstance(named, dict) else {}
    if "height" in sizes and not side:
        size = _size(sizes) or (800, 1333)
        return Preprocessing(size, "squash", 0, _filter(stated), *_normalisation(stated))
    shorter = int(side or sizes.get("shortest_edge") or 800)
    longer = int(sizes.get("longest_edge") or 1333)
    size = (shorter, max(shorter, longer))
    return Preprocessing(size, "within", 0, _filter(stated), *_normalisation(stated))


def _size(value: Any) -> Size | None:
    """Height and width of any of the ways sizes are written."""
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


def _normalisation(stated: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    factor = stated.get("rescale_factor") or 1 / 255
    unit = 1 / factor if stated.get("do_rescale", True) else 1.0
    if not stated.get("do_normalize", True):
        return (0.0,) * 3, (unit,) * 3
    mean, std = stated.get("image_mean") or IMAGENET_MEAN, stated.get("image_std") or IMAGENET_STD
    return tuple(unit * float(m) for m in mean), tuple(unit * float(s) for s in std)
