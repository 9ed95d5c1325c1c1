"""The extractor "segments": regions from colour and outline, described by hand-made numbers."""

from __future__ import annotations

import numpy as np
from PIL import Image

from counterfoil.data.fragments import Fragments
from counterfoil.errors import ConfigError
from counterfoil.features.descriptors import DIM, describe_regions
from counterfoil.features.extractors import extractors
from counterfoil.features.regions import propose

VERSION = 1


@extractors.register("segments")
class Segments:
    """Regions by colour and outline with classical descriptors; needs no model and no download."""

    name = "segments"
    dim = DIM

    def __init__(
        self, *, max_fragments: int = 20, side: int = 192, least_share: float = 0.0008
    ) -> None:
        """``side`` is the working size; regions below ``least_share`` of the image are ignored."""
        if max_fragments < 1 or side < 16:
            raise ConfigError(
                "segments: max_fragments must be at least 1 and side at least 16, "
                f"got {max_fragments} and {side}"
            )
        self.max_fragments = max_fragments
        self.side = side
        self.least_share = least_share

    def fingerprint(self) -> str:
        return f"segments {VERSION} {self.max_fragments} {self.side} {self.least_share}"

    def extract(self, image: Image.Image) -> Fragments:
        """The whole image first, then objects and their layers by size."""
        pixels = self._pixels(image)
        height, width = pixels.shape[:2]
        least = max(4, round(self.least_share * height * width))
        regions = propose(pixels, self.max_fragments, least)
        features = describe_regions(pixels, regions)
        scale = np.array([width, height, width, height], dtype=np.float32)
        return Fragments(features, (regions.boxes / scale).astype(np.float32))

    def _pixels(self, image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The image at working size: the longer side fixed, the shorter at least a few pixels."""
        image = image.convert("RGB")
        scale = self.side / max(image.size)
        size = (max(8, round(image.width * scale)), max(8, round(image.height * scale)))
        if image.size != size:
            image = image.resize(
                size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
            )
        return np.asarray(image)
