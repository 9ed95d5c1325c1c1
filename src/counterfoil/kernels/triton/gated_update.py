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


def fused_update(old: Tensor, of_query: Tensor, of_context: Tensor) -> Tensor:
    """As `kernels.gated_update`."""
    updated: Tensor = _GatedUpdate.apply(
        old.contiguous(), of_query.contiguous(), of_context.contiguous()
    )
    return updated


class _GatedUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: Tensor, of_query: Tensor, of_context: Tensor) -> Tensor:
        from counterfoil.kernels.triton.gated_update_kernels import update

        ctx.save_for_backward(old, of_query, of_context)
        updated = of_context.new_empty(*of_context.shape[:-1], old.shape[-1])
        _run(update, [old, of_query, of_context, updated], results=1)
        return updated

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from counterfoil.kernels.triton.gated_update_kernels import update_gradients

        old, of_query, of_context = ctx.saved_tensors
        d_old, d_context = torch.empty_like(old), torch.empty_like(of_context)
        shared = (of_query.shape, of_query.dtype) != (of_context.shape, of_context.dtype)
        d_query = torch.empty_like(of_query) if shared else d_context
        tensors = [old, of_query, of_context, upstream.contiguous(), d_old, d_query, d_context]
        _run(update_gradients, tensors, results=3, SHARED=shared)
        return d_old, d_query, d_context


def _run(kernel: Any, tensors: list[Tensor], results: int, **options: bool) -> None:
    """Launch a kernel with a program for each row of the old values, or part of a row."""
    old, _, of_context, *_ = tensors
    width = old.shape[-1]
    rows, block = old.numel() // max(1, width), min(BLOCK, block_of(width))
    shared_by = math.prod(of_context.shape[:-1]) // max(1, rows)
    if not rows or not shared_by:
        for result in tensors[-results:]:
            result.zero_()
        return
    with torch.cuda.device_of(old):
        kernel[(rows, -(-width // block))](
            *tensors, rows, shared_by, width, **options, BLOCK=block, num_warps=4
        )
