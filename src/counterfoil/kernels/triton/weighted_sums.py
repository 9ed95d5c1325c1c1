"""Launches of the kernels of weighted sums, with gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.triton.launch import block_of

NUMBERS = 2048
"""Numbers of a program, sixteen for each thread of its four warps."""


def fused_sums(values: Tensor, weights: Tensor, first: int, last: int) -> Tensor:
    """As `kernels.weighted_sums`, for weights that are shared along the axes first … last − 1."""
    sums: Tensor = _WeightedSums.apply(values.contiguous(), weights.contiguous(), first, last)
    return sums


class _WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor, first: int, last: int) -> Tensor:
        from counterfoil.kernels.triton.weighted_sums_kernels import sums

        ctx.save_for_backward(values, weights)
        ctx.axes = first, last
        dtype = torch.result_type(values, weights)
        if torch.is_autocast_enabled(values.device.type):  # which sums in single precision
            dtype = torch.float32
        result = values.new_empty(values.shape[:-1], dtype=dtype)
        _run(sums, [values, weights, result], ctx.axes, results=1)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from counterfoil.kernels.triton.weighted_sums_kernels import gradients

        values, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient of this gradient may be wanted
            above = upstream[..., None]
            of_weights = (above * values).sum_to_size(weights.shape)
            return (above * weights).to(values.dtype), of_weights.to(weights.dtype), None, None
        d_values, d_weights = torch.empty_like(values), torch.empty_like(weights)
        tensors = [values, weights, upstream.contiguous(), d_values, d_weights]
        _run(gradients, tensors, ctx.axes, results=2)
        return d_values, d_weights, None, None


def _run(kernel: Any, tensors: list[Tensor], axes: tuple[int, int], results: int) -> None:
    """Launch a kernel with a program for each few rows of the weights."""
    shape, length = tensors[0].shape[:-1], tensors[0].shape[-1]
    shared_by, after = math.prod(shape[slice(*axes)]), math.prod(shape[axes[1] :])
    rows = math.prod(shape[: axes[0]]) * after
    if not length or not rows or not shared_by:
        for result in tensors[-results:]:
            result.zero_()
        return
    width = block_of(length)
    block = max(1, NUMBERS // width)
    with torch.cuda.device_of(tensors[0]):
        kernel[(-(-rows // block),)](
            *tensors, rows, shared_by, after, length, BLOCK=block, WIDTH=width, num_warps=4
        )
