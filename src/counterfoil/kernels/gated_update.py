"""The gated update of a recurrent memory.

Every number of every query fragment of every pair has a gate and an update. PyTorch reads and
writes tensors of that size about thirty times in a training step; the kernel does so eleven times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.kernels.spec import usable


def gated_update(old: Tensor, logits: Tensor) -> Tensor:
    """σ(g) old + (1 − σ(g)) tanh(o) [..., D], from logits [..., 2D] = [g; o], in their precision.

    ``old`` [..., D] may have leading axes of length 1: it is then shared along these.
    """
    if not _broadcasts_over_leading_axes(old.shape, logits.shape):
        raise ArgumentError(
            f"gated_update: old values {tuple(old.shape)}, logits {tuple(logits.shape)}; expected "
            "[..., D] and [..., 2D] whose other axes are equal, but for leading ones of length 1"
        )
    by_kernel = torch.is_grad_enabled() and usable(logits.device, logits.dtype)
    if by_kernel and not is_exporting():
        from counterfoil.kernels.triton.gated_update import fused_update

        return fused_update(old, logits)
    gate, update = logits.chunk(2, dim=-1)
    gate = gate.sigmoid()
    return (gate * old + (1 - gate) * update.tanh()).to(logits.dtype)


def _broadcasts_over_leading_axes(old: torch.Size, logits: torch.Size) -> bool:
    """Whether only leading axes of ``old``, of length 1, differ from those of the logits."""
    axes = list(old[:-1])
    while axes and axes[0] == 1:
        axes.pop(0)
    same_axes = list(logits[len(logits) - 1 - len(axes) : -1]) == axes
    return same_axes and logits[-1] == 2 * old[-1] and len(old) <= len(logits)
