"""Launches of the kernels of a gated update, with gradients.

Only the old values and the logits are kept; the backward pass computes gates and updates again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.first_order import first_order_only
from counterfoil.kernels.triton.launch import block_of

BLOCK = 1024
"""Most numbers of a program, eight for each thread of its four warps."""


def fused_update(old: Tensor, logits: Tensor) -> Tensor:
    """As `kernels.gated_update`."""
    updated: Tensor = _GatedUpdate.apply(old.contiguous(), logits.contiguous())
    return updated


class _GatedUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: Tensor, logits: Tensor) -> Tensor:
        from counterfoil.kernels.triton.gated_update_kernels import update

        ctx.save_for_backward(old, logits)
        updated = logits.new_empty(*logits.shape[:-1], old.shape[-1])
        _run(update, old, logits, updated)
        return updated

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        from counterfoil.kernels.triton.gated_update_kernels import update_gradients

        old, logits = ctx.saved_tensors
        of_old, of_logits = torch.empty_like(old), torch.empty_like(logits)
        _run(update_gradients, old, logits, upstream.contiguous(), of_old, of_logits)
        return of_old, of_logits


def _run(kernel: Any, old: Tensor, *rest: Tensor) -> None:
    """Launch a kernel with a program for each row of ``old``, or part of a row."""
    width = old.shape[-1]
    rows, block = old.numel() // max(1, width), min(BLOCK, block_of(width))
    shared_by = math.prod(rest[0].shape[:-1]) // max(1, rows)
    if not rows or not shared_by:
        for gradient in rest[2:]:
            gradient.zero_()
        return
    with torch.cuda.device_of(old):
        kernel[(rows, -(-width // block))](
            old, *rest, rows, shared_by, width, BLOCK=block, num_warps=4
        )
