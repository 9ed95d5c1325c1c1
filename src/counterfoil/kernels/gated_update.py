"""The gated update of a recurrent memory.

Every number of every query fragment of every pair has a gate and an update. PyTorch reads and
writes tensors of that size three to six times as often in a training step as the kernel does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.kernels.spec import usable


def gated_update(old: Tensor, of_query: Tensor, of_context: Tensor) -> Tensor:
    """σ(g) old + (1 − σ(g)) tanh(o) [..., D], from logits [..., 2D] = [g; o], in their precision.

    The logits are the sum of those of the query and of the context. ``old`` [..., D] and
    ``of_query`` [..., 2D] may have leading axes of length 1: they are then shared along these.
    """
    given = tuple(old.shape), tuple(of_query.shape), tuple(of_context.shape)
    if given[1] != (*given[0][:-1], 2 * given[0][-1]) or not _broadcasts_over_leading_axes(*given):
        raise ArgumentError(
            "gated_update: old values {}, logits of the query {} and of the context {}; expected "
            "[..., D] and twice [..., 2D] whose other axes are equal, but for leading ones of "
            "length 1 of the first two".format(*given)
        )
    by_kernel = torch.is_grad_enabled() and usable(of_context.device, of_context.dtype)
    if by_kernel and not is_exporting():
        from counterfoil.kernels.triton.gated_update import fused_update

        return fused_update(old, of_query, of_context)
    logits = of_query + of_context
    gate, update = logits.chunk(2, dim=-1)
    gate = gate.sigmoid()
    return (gate * old + (1 - gate) * update.tanh()).to(of_context.dtype)


def _broadcasts_over_leading_axes(
    old: tuple[int, ...], of_query: tuple[int, ...], of_context: tuple[int, ...]
) -> bool:
    """Whether only leading axes of the query's, of length 1, differ from those of the context's."""
    axes = list(old[:-1])
    while axes and axes[0] == 1:
        axes.pop(0)
    same_axes = list(of_context[len(of_context) - 1 - len(axes) : -1]) == axes
    return same_axes and of_context[-1] == of_query[-1] and len(old) <= len(of_context)
