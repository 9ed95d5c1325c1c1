"""Extractors "joined" (several backbones combined) and "crops" (a backbone on windows)."""

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
from counterfoil.features.extractors import (
    Array,
    Backbone,
    NetworkOutput,
    extractors,
    single_fragment,
)
from counterfoil.features.views import Box, View, crop_boxes

_MAX_CROPS = 400


@dataclass(frozen=True)
class _PartView(View):
    """A view for one of the parts: the index of the part, and the part's own view."""

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

        ``along="fragments"`` concatenates the fragments of all parts, which must have the same
        width; ``along="channels"`` concatenates their vectors cell by cell, if the parts have the
        same cells. A part may be joined itself. ``unit`` first normalizes each part's vectors, so
        that no part outweighs another.
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
        parts = " + ".join(part.fingerprint() for part in self.parts)
        return f"joined along {self.along} unit={self.unit}: {parts}"

    def to(self, device: str) -> None:
        for part in self.parts:
            part.to(device)

    def views(self, image: Image.Image) -> list[View]:
        return [
            _PartView(view.pixels, view.box, number, view)
            for number, part in enumerate(self.parts)
            for view in part.views(image)
        ]

    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        raise ConfigError(
            "joined: its parts preprocess a picture differently; call run, not forward"
        )

    def run(self, images: Sequence[list[View]]) -> list[Fragments]:
        """Each part runs on its own views."""
        outputs = [
            part.run([_views_of(views, number) for views in images])
            for number, part in enumerate(self.parts)
        ]
        return [self._join(parts) for parts in zip(*outputs, strict=True)]

    def _join(self, parts: Sequence[Fragments]) -> Fragments:
        features = [_unit(part.features) if self.unit else part.features for part in parts]
        if self.along == "channels":
            _check_boxes(parts)
            return Fragments(np.concatenate(features, axis=1), parts[0].boxes)
        boxes = [part.boxes for part in parts if part.boxes is not None]
        return Fragments(np.concatenate(features), np.concatenate(boxes))


def _backbone(text: str) -> Backbone:
    inner = extractors.create(text, {}, where="features.parts")
    if not isinstance(inner, Backbone):
        raise ConfigError(f"joined: '{text}' is not a network whose fragments can be joined")
    return inner


def _check_boxes(parts: Sequence[Fragments]) -> None:
    """Refuse to concatenate channels of fragments with different boxes."""
    boxes = [part.boxes for part in parts if part.boxes is not None]
    if any(not np.allclose(boxes[0], other, atol=1e-3) for other in boxes[1:]):
        raise ConfigError(
            "joined: along channels, the parts' fragments must have the same boxes in the same "
            "order; choose other parts, or along=fragments"
        )


def _views_of(views: Sequence[View], number: int) -> list[View]:
    parts = (view for view in views if isinstance(view, _PartView) and view.part == number)
    return [part.own for part in parts if part.own is not None]


def _unit(features: Array) -> Array:
    length = np.linalg.norm(features, axis=-1, keepdims=True)
    return np.asarray(features / np.maximum(length, 1e-8), dtype=np.float32)


@extractors.register("crops")
class Crops(Backbone):
    """Windows of several scales, one vector each from another backbone; needs no detector."""

    name: ClassVar[str] = "crops"

    def __init__(
        self,
        *,
        base: str = "efficientnet-lite",
        base_options: dict[str, Any] | None = None,
        scales: Sequence[float] = (1.0, 0.5),
    ) -> None:
        """``scales`` are sides of windows relative to the image's; windows overlap by half."""
        if not scales or not all(0.02 <= scale <= 1 for scale in scales):
            raise ConfigError(f"crops: scales must be within 0.02…1, got {list(scales)}")
        inner = extractors.create(base, base_options or {}, where="features.base_options")
        if not isinstance(inner, Backbone) or isinstance(inner, Crops):
            raise ConfigError(f"crops: base '{base}' is not a network that can be run on crops")
        self.base = inner
        self.scales = sorted({float(scale) for scale in scales}, reverse=True)
        self.windows = crop_boxes(self.scales)
        if len(self.windows) > _MAX_CROPS:
            raise ConfigError(
                f"crops: {len(self.windows)} windows per image, at most {_MAX_CROPS} are "
                "supported; use larger scales"
            )
        super().__init__(pooled=False, batch_size=inner.batch_size)

    def fingerprint(self) -> str:
        return f"crops {self.scales} of {self.base.fingerprint()}"

    def to(self, device: str) -> None:
        self.base.to(device)

    @property
    def views_per_batch(self) -> int:
        return self.base.views_per_batch

    def views(self, image: Image.Image) -> list[View]:
        return [self._view(image, window) for window in self.windows]

    def _view(self, image: Image.Image, window: Box) -> View:
        width, height = image.size
        left, upper = int(window[0] * width), int(window[1] * height)
        right = max(round(window[2] * width), left + 1)
        lower = max(round(window[3] * height), upper + 1)
        return View(self.base.views(image.crop((left, upper, right, lower)))[0].pixels, window)

    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        return single_fragment(self.base.vectors(pixels))

    def gather(self, outputs: list[tuple[Box, NetworkOutput]]) -> Fragments:
        features = np.concatenate([output.features[0] for _, output in outputs])
        return Fragments(features, np.array([window for window, _ in outputs], dtype=np.float32))
