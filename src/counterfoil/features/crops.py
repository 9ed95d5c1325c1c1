"""The extractor "crops": windows of several scales as regions, each seen by another backbone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.data.fragments import Fragments
from counterfoil.errors import ConfigError
from counterfoil.features.backbone import Backbone, Seen, whole
from counterfoil.features.extractors import extractors
from counterfoil.features.views import Box, View, crop_boxes

_MOST = 400


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
        if len(self.windows) > _MOST:
            raise ConfigError(f"crops: {len(self.windows)} windows an image, at most {_MOST}")
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
