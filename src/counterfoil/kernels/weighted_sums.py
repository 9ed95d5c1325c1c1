"""Sums of products along the last axis: what attention weights make of similarities.

PyTorch writes all products and reads them again, in both directions, in single precision if one
side is. The kernel reads its inputs once and writes the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.kernels.spec import usable

LONGEST = 1024
"""Numbers of a sum, at most, that the kernel adds: a program holds whole rows."""


def weighted_sums(values: Tensor, weights: Tensor) -> Tensor:
    """Σ_k values [..., K] · weights [..., K], without the last axis.

    The weights may have one run of neighboring axes of length 1, along which they are shared.
    """
    shared = _shared_axes(values.shape, weights.shape)
    by_kernel = (
        torch.is_grad_enabled()
        and values.shape[-1] <= LONGEST
        and usable(values.device, values.dtype)
        and usable(weights.device, weights.dtype)
    )
    if by_kernel and not is_exporting():
        from counterfoil.kernels.triton.weighted_sums import fused_sums

        return fused_sums(values, weights, *shared)
    return (values * weights).sum(-1)


def _shared_axes(values: torch.Size, weights: torch.Size) -> tuple[int, int]:
    """The first axis that the weights are shared along, and the one after the last."""
    if len(values) == len(weights) and values[-1:] == weights[-1:]:
        pairs = list(enumerate(zip(values, weights, strict=True)))
        shared = [axis for axis, (theirs, ours) in pairs if theirs != ours]
        first, last = (shared[0], shared[-1] + 1) if shared else (0, 0)
        if all(weights[axis] == 1 for axis in range(first, last)):
            return first, last
    raise ArgumentError(
        f"weighted_sums: values {tuple(values)}, weights {tuple(weights)}; expected the same "
        "shape, but for one run of neighboring axes, before the last, of length 1 in the weights"
    )
