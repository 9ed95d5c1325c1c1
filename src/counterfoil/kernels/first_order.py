"""Backward passes whose gradients cannot be differentiated again, and that say so.

PyTorch's `once_differentiable` does so only if the gradient from above needs a gradient itself.
Otherwise, as in ``torch.autograd.grad(scores.sum(), x, create_graph=True)``, its gradients have no
graph, and a penalty on them is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass without second derivatives: to differentiate its gradients is an error."""

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return tuple(gradients)
        anchor = torch.zeros((), requires_grad=True)
        return tuple(
            _Final.apply(each, anchor) if isinstance(each, Tensor) else each for each in gradients
        )

    return wrapped


class _Final(torch.autograd.Function):
    """A gradient as it is; ``anchor`` needs a gradient, so that a backward pass comes here."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise ArgumentError(
            "second derivatives: these scores have first derivatives only, so a penalty on a "
            "gradient, or a Hessian, cannot be computed; use a matcher without attention over all "
            "pairs at once, such as cosine or SGRAF"
        )
