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
    if not _fits(old.shape, logits.shape):
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


def _fits(old: torch.Size, logits: torch.Size) -> bool:
    own = list(old[:-1])
    while own and own[0] == 1:
        own.pop(0)
    same = list(logits[len(logits) - 1 - len(own) : -1]) == own
    return same and logits[-1] == 2 * old[-1] and len(old) <= len(logits)
