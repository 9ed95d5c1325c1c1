"""EfficientNet-Lite in PyTorch, for inference.

EfficientNet without squeeze-and-excitation and with ReLU6 (Tan and Le 2019; Liu 2020). Padding is
TensorFlow's "SAME", with an odd row at the bottom and an odd column at the right. Batch norms are
folded into the convolutions when weights are loaded.

It is separate from its extractor, so that `counterfoil.features` does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


@dataclass(frozen=True)
class Variant:
    """Scales of a variant relative to Lite0."""

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
        if below % 2 or right % 2:  # otherwise the convolution pads both sides itself (faster)
            x = F.pad(x, (sides[1], right - sides[1], sides[0], below - sides[0]))
            sides = (0, 0)
        return F.conv2d(x, self.weight, self.bias, stride, sides, groups=self.groups)


def _missing(size: int, kernel: int, stride: int) -> int:
    """Total padding along an axis."""
    return max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)


class Block(nn.Module):
    """Inverted residual: expand, depthwise convolution, project; residual if the shapes agree."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        self.expand = SameConv(inner, wide, 1) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.project = SameConv(wide, outer, 1)
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        # in place, which saves a third of the time
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
        """Load weights with the names of the PyTorch ports of the TensorFlow release."""
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
    """The nearest multiple of eight that is at least 90 % of the exact number."""
    exact = channels * width
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _fold(conv: SameConv, weights: Mapping[str, Tensor], name: str, norm: str) -> None:
    """Fold a batch norm into the convolution before it."""
    mean, variance = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
    scale = weights[f"{norm}.weight"] / torch.sqrt(variance + _EPSILON)
    with torch.no_grad():
        conv.weight.copy_(weights[f"{name}.weight"] * scale[:, None, None, None])
        if conv.bias is not None:
            conv.bias.copy_(weights[f"{norm}.bias"] - mean * scale)
