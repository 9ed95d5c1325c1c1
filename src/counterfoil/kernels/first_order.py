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
    """A backward pass without second derivatives: to differentiate its gradients is an error.

    The inputs that need gradients must be among the saved tensors.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return tuple(gradients)
        # what the gradients depend on, as autograd visits only nodes on the way to its inputs
        tensors = [each for each in (*ctx.saved_tensors, *grads) if isinstance(each, Tensor)]
        origins = [each for each in tensors if each.requires_grad]
        return tuple(
            _NoSecondDerivative.apply(each, *origins) if isinstance(each, Tensor) else each
            for each in gradients
        )

    return wrapped


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient as it is, with the tensors that it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *origins: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise ArgumentError(
            "second derivatives: these scores have first derivatives only, so a penalty on a "
            "gradient, or a Hessian, cannot be computed; use a matcher without attention over all "
            "pairs at once, such as cosine or SGRAF"
        )
