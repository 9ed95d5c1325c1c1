"""Results and gradients of an operation, by its kernels, beside PyTorch's in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def with_gradients(
    operation: Callable[..., Tensor], inputs: Sequence[Tensor], above: Tensor
) -> list[Tensor]:
    """What an operation returns, and the gradients of its inputs for one from above."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    result = operation(*leaves)
    result.backward(above.to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def assert_as_in_double(
    operation: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    above: Tensor,
    dtype: torch.dtype,
    tolerance: float,
    device: str = "cpu",
) -> None:
    """The result is in ``dtype``, each gradient in that of its input, all close to double's."""
    here = with_gradients(operation, [one.to(device) for one in inputs], above.to(device))
    assert [one.dtype for one in here] == [dtype, *(one.dtype for one in inputs)]
    exact = with_gradients(operation, [one.double() for one in inputs], above.double())
    for mine, theirs in zip(here, exact, strict=True):
        scale = theirs.abs().amax().clamp(min=1) if theirs.numel() else 1.0
        assert mine.shape == theirs.shape
        assert torch.allclose(mine.cpu().double(), theirs, atol=float(tolerance * scale))
