"""Launches of the packed attention kernels, with gradients.

Attention weights are computed again in the backward pass, with the same dropout, so that nothing
but queries, keys and values is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.first_order import first_order_only
from counterfoil.kernels.triton.launch import block_of, precision

MANY_TOKENS = 64
"""Block sizes above this one take eight warps instead of four."""

FEWEST_ROWS = 16
"""Least rows of a matrix product."""

SEEDS = 1 << 62


def on_chip(longest: int, width: int) -> int:
    """Bytes of shared memory that the backward kernel takes, with ``width`` numbers per head.

    As reported by Triton's compiler: blocks of weights, queries, keys and values in half precision.
    """
    block = block_of(longest)
    return 2 * block * (block + 3 * width) + (1 << 13)


def attend(
    joined: Tensor, starts: Tensor, longest: int, heads: int, dropout: float, first: Tensor | None
) -> Tensor:
    """As `kernels.packed_attention`. Dropout draws one seed from PyTorch's generator."""
    seed = torch.randint(SEEDS, (1,), device=joined.device) if dropout else None
    first = first if first is None else first.to(joined.dtype).contiguous()
    attended: Tensor = _PackedAttention.apply(
        joined.contiguous(), first, starts, seed, longest, heads, dropout
    )
    return attended


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joined: Tensor,
        first: Tensor | None,
        starts: Tensor,
        seed: Tensor | None,
        longest: int,
        heads: int,
        dropout: float,
    ) -> Tensor:
        from counterfoil.kernels.triton.packed_attention_kernels import attention

        ctx.save_for_backward(joined, first, starts, seed)
        ctx.options = longest, heads, dropout
        queries, keys, values = _parts(joined, first)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        _run(attention, ctx, joined, first, starts, seed, queries, keys, values, attended)
        return attended

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        from counterfoil.kernels.triton.packed_attention_kernels import attention_gradients

        joined, first, starts, seed = ctx.saved_tensors
        of_joined = torch.empty_like(joined)
        of_first = first if first is None else torch.empty_like(first)
        parts, gradients = _parts(joined, first), _parts(of_joined, of_first)
        upstream = upstream.contiguous()
        with torch.cuda.device_of(joined):
            given = joined, first, starts, seed
            _run(attention_gradients, ctx, *given, *parts, upstream, *gradients)
        return of_joined, of_first, None, None, None, None, None


def _parts(joined: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values."""
    if first is None:
        queries, keys, values = joined.chunk(3, dim=1)
        return queries, keys, values
    keys, values = joined.chunk(2, dim=1)
    return first, keys, values


def _run(
    kernel: Any,
    ctx: Any,
    joined: Tensor,
    first: Tensor | None,
    starts: Tensor,
    seed: Tensor | None,
    queries: Tensor,
    *rest: Tensor,
) -> None:
    """Launch a kernel with one program per sequence and head."""
    longest, heads, dropout = ctx.options
    width = queries.shape[1] // heads
    block = block_of(longest)
    kernel[(len(starts) * heads,)](
        queries, *rest, starts, starts if seed is None else seed,
        len(starts), len(joined), queries.stride(0), joined.stride(0), width**-0.5, dropout,
        HEADS=heads, WIDTH=width, BK=block, BQ=block if first is None else FEWEST_ROWS,
        FIRST_ONLY=first is not None, DROPS=seed is not None, PRECISION=precision(joined.dtype),
        num_warps=8 if block > MANY_TOKENS else 4,
    )  # fmt: skip
