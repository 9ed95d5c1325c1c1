"""Similarities of regions with words on a CPU, in the way that is fastest for their precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from counterfoil.kernels.digits import WIDEST, digits, multiplied_fast, multiply

WIDE = 256
"""Entries of fragments from which on digits pay."""

Block = Callable[[slice, Tensor], Tensor | None]
"""Writes similarities [c, K, M] of some images in float32, and returns what they are yet to be
multiplied by, region by region [c, K], or None."""


class Products(Protocol):
    """Regions [C, K, D], ready to be multiplied."""

    def times(self, words: Tensor, scale: float) -> Block:
        """With words [M, D], and with a number."""


class PlainProducts:
    """Products in float32."""

    def __init__(self, v: Tensor) -> None:
        self.v = v

    def times(self, words: Tensor, scale: float) -> Block:
        scaled = (words * scale).T

        def block(images: slice, out: Tensor) -> None:
            torch.mm(self.v[images].flatten(0, 1), scaled, out=out.flatten(0, 1))

        return block


class HalfProducts(PlainProducts):
    """Products in bfloat16, then brought into float32."""

    def times(self, words: Tensor, scale: float) -> Block:
        def block(images: slice, out: Tensor) -> None:
            halves = self.v[images].flatten(0, 1) @ words.T
            out.copy_(halves.view(out.shape)).mul_(scale)

        return block


class DigitProducts:
    """Products of digits (`digits`)."""

    def __init__(self, v: Tensor) -> None:
        self.regions = v.shape[1]
        self.v = digits(v.flatten(0, 1))

    def times(self, words: Tensor, scale: float) -> Block:
        packed = digits(words).packed()
        scales = packed.scales * scale

        def block(images: slice, out: Tensor) -> Tensor:
            rows = slice(images.start * self.regions, images.stop * self.regions)
            multiply(self.v, rows, packed, scales, out.flatten(0, 1))
            return self.v.scales[rows].view(-1, self.regions)

        return block


def products_of(v: Tensor, rounded: bool) -> Products:
    """The way for regions [C, K, D]; ``rounded``: similarities in float32 may be (`digits`)."""
    if v.dtype != torch.float32:
        return HalfProducts(v)
    wide = WIDE <= v.shape[2] <= WIDEST
    return DigitProducts(v) if rounded and wide and multiplied_fast() else PlainProducts(v)
