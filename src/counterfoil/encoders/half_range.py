"""Half precision in between, with gradients that neither overflow nor vanish.

A backward pass is linear in the gradient that it starts from, so that gradient may be scaled into
the range of float16 and the results scaled back. The scale is a power of two, found anew in every
pass from the largest gradient: nothing is rounded by it, no host has to wait, and no loss scale has
to be tuned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGEST = 2.0**-6
"""What the largest gradient is scaled below.

Within, gradients are summed over time and over all words of a batch: float16 ends at 65,504. Its
smallest numbers are 6e-8, so gradients down to a 250,000th of the largest one still count.
"""


class HalfRange:
    """One stretch of half precision: its inputs and weights `enter` it, its results `leave` it.

    >>> stretch, x = HalfRange(), torch.tensor([1.0], requires_grad=True)
    >>> (2.0**20 * stretch.leave(3 * stretch.enter(x))).backward()
    >>> x.grad.item() / 2.0**20
    3.0
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """In float16; its gradient comes back in the precision of ``x``, unscaled."""
        entered: Tensor = _Enter.apply(self, x)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """In single precision; the gradient that comes back is scaled."""
        left: Tensor = _Leave.apply(self, x)
        return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: HalfRange, x: Tensor) -> Tensor:
        ctx.stretch, ctx.dtype = stretch, x.dtype
        return x.half()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, (gradient.float() / ctx.stretch.scale).to(ctx.dtype)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: HalfRange, x: Tensor) -> Tensor:
        ctx.stretch = stretch
        return x.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.stretch.scale = scale = power_of_two(gradient)
        return None, (gradient * scale).half()


def power_of_two(gradient: Tensor) -> Tensor:
    """The scale that brings the largest gradient to `LARGEST` or just below.

    One where there is none: a gradient that is not finite stays so, and is seen.
    """
    largest = gradient.abs().amax()
    exponent = torch.floor(torch.log2(LARGEST / largest)).clamp(-120, 120)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.exp2(exponent), torch.ones_like(largest))
