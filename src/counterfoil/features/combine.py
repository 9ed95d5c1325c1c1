"""The extractors "joined", several backbones as one, and "crops", windows seen by a backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError
from counterfoil.data.fragments import Fragments
from counterfoil.features.backbone import Array, Backbone, Seen, whole
from counterfoil.features.extractors import extractors
from counterfoil.features.views import Box, View, crop_boxes

_MAX_CROPS = 400


@dataclass(frozen=True)
class _PartView(View):
    """A view, and which of the parts is to see it, as that part made it."""

    part: int = 0
    own: View | None = None


@extractors.register("joined")
class Joined(Backbone):
    """Several backbones combined: more fragments per picture, or concatenated cell vectors."""

    name: ClassVar[str] = "joined"

    def __init__(
        self,
        *,
        parts: Sequence[str] = ('efficientnet-lite {"grid": 6}', "crops"),
        along: Literal["fragments", "channels"] = "fragments",
        unit: bool = False,
    ) -> None:
        """``parts`` are backbones by name, with options as in ``'crops {"scales": [1, 0.5]}'``.

        ``along="fragments"`` puts the fragments of all parts after each other, which must be
        equally wide; ``along="channels"`` puts their vectors end to end, cell by cell, where the
        parts have the same cells. A part may be joined itself. ``unit`` first makes each part's
        vectors of length one, so that no part outweighs another.
        """
        if len(parts) < 2:
            raise ConfigError(f"joined: expected at least two parts, got {list(parts)}")
        self.parts = [_backbone(part) for part in parts]
        self.along, self.unit = along, unit
        super().__init__(pooled=False, batch_size=max(part.batch_size for part in self.parts))

    @cached_property
    def _shape(self) -> tuple[int, int]:
        counts = [part.max_fragments for part in self.parts]
        widths = [part.dim for part in self.parts]
        same = widths if self.along == "fragments" else counts
        if len(set(same)) > 1:
            what = "numbers in a vector" if self.along == "fragments" else "fragments"
            raise ConfigError(
                f"joined: along {self.along}, all parts need as many {what}, got "
                f"{', '.join(map(str, same))}; choose other parts, or the other way to join them"
            )
        if self.along == "fragments":
            return sum(counts), widths[0]
        return counts[0], sum(widths)

    def fingerprint(self) -> str:
        told = " + ".join(part.fingerprint() for part in self.parts)
        return f"joined along {self.along} unit={self.unit}: {told}"

    def to(self, device: str) -> None:
        for part in self.parts:
            part.to(device)

    def views(self, image: Image.Image) -> list[View]:
        return [
            _PartView(view.pixels, view.box, number, view)
            for number, part in enumerate(self.parts)
            for view in part.views(image)
        ]

    def forward(self, pixels: NDArray[np.uint8]) -> Seen:
        raise ConfigError(
            "joined: its parts see a picture each in its own way; use them one by one"
        )

    def run(self, images: Sequence[list[View]]) -> list[Fragments]:
        """Each part runs on the views that are its own."""
        found = [
            part.run([_of_part(views, number) for views in images])
            for number, part in enumerate(self.parts)
        ]
        return [self._join(of_image) for of_image in zip(*found, strict=True)]

    def _join(self, found: Sequence[Fragments]) -> Fragments:
        features = [_unit(one.features) if self.unit else one.features for one in found]
        if self.along == "channels":
            _check_places(found)
            return Fragments(np.concatenate(features, axis=1), found[0].boxes)
        boxes = [one.boxes for one in found if one.boxes is not None]
        return Fragments(np.concatenate(features), np.concatenate(boxes))


def _backbone(text: str) -> Backbone:
    inner = extractors.create(text, {}, where="features.parts")
    if not isinstance(inner, Backbone):
        raise ConfigError(f"joined: '{text}' is not a network whose fragments can be joined")
    return inner


def _check_places(found: Sequence[Fragments]) -> None:
    """Vectors end to end are of one place: parts whose fragments lie elsewhere are refused."""
    boxes = [one.boxes for one in found if one.boxes is not None]
    if any(not np.allclose(boxes[0], other, atol=1e-3) for other in boxes[1:]):
        raise ConfigError(
            "joined: along channels, the parts' fragments must lie in the same places of the "
            "picture, in the same order; choose other parts, or along=fragments"
        )


def _of_part(views: Sequence[View], number: int) -> list[View]:
    mine = (view for view in views if isinstance(view, _PartView) and view.part == number)
    return [view.own for view in mine if view.own is not None]


def _unit(features: Array) -> Array:
    length = np.linalg.norm(features, axis=-1, keepdims=True)
    return np.asarray(features / np.maximum(length, 1e-8), dtype=np.float32)


@extractors.register("crops")
class Crops(Backbone):
    """Windows of several scales, one vector each from another backbone: regions, no detector."""

    name: ClassVar[str] = "crops"

    def __init__(
        self,
        *,
        base: str = "efficientnet-lite",
        base_options: dict[str, Any] | None = None,
        scales: Sequence[float] = (1.0, 0.5),
    ) -> None:
        """``scales`` are sides of the windows as shares of the picture's; they overlap by half."""
        if not scales or not all(0.02 <= scale <= 1 for scale in scales):
            raise ConfigError(f"crops: scales must be within 0.02…1, got {list(scales)}")
        inner = extractors.create(base, base_options or {}, where="features.base_options")
        if not isinstance(inner, Backbone) or isinstance(inner, Crops):
            raise ConfigError(f"crops: base '{base}' is not a network that can be run on crops")
        self.base = inner
        self.scales = sorted({float(scale) for scale in scales}, reverse=True)
        self.windows = crop_boxes(self.scales)
        if len(self.windows) > _MAX_CROPS:
            raise ConfigError(f"crops: {len(self.windows)} windows an image, at most {_MAX_CROPS}")
        super().__init__(pooled=False, batch_size=inner.batch_size)

    def fingerprint(self) -> str:
        return f"crops {self.scales} of {self.base.fingerprint()}"

    def to(self, device: str) -> None:
        self.base.to(device)

    @property
    def at_once(self) -> int:
        return self.base.at_once

    def views(self, image: Image.Image) -> list[View]:
        return [self._view(image, window) for window in self.windows]

    def _view(self, image: Image.Image, window: Box) -> View:
        width, height = image.size
        left, upper = int(window[0] * width), int(window[1] * height)
        right = max(round(window[2] * width), left + 1)
        lower = max(round(window[3] * height), upper + 1)
        return View(self.base.views(image.crop((left, upper, right, lower)))[0].pixels, window)

    def forward(self, pixels: NDArray[np.uint8]) -> Seen:
        return whole(self.base.vectors(pixels))

    def gather(self, seen: list[tuple[Box, Seen]]) -> Fragments:
        features = np.concatenate([made.features[0] for _, made in seen])
        return Fragments(features, np.array([window for window, _ in seen], dtype=np.float32))
