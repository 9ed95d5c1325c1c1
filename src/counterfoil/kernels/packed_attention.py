"""Self-attention over packed sequences of different lengths, by a Triton kernel where one can run.

A cross-encoder reads a thousand pairs of some fifty tokens at once. PyTorch's attention needs them
padded and masked; the kernel reads each sequence where it stands, in one block per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.kernels.spec import shared_memory, usable

LONGEST = 128
"""Tokens of the longest sequence: the kernel holds all of its attention weights at once."""

HEAD_WIDTHS = (16, 32, 64, 128)
"""Numbers per head that the kernel multiplies without padding."""

HALVES = (torch.float16, torch.bfloat16)


def packed_attention(
    joined: Tensor,
    starts: Tensor,
    longest: int,
    heads: int,
    dropout: float = 0.0,
    first: Tensor | None = None,
) -> Tensor | None:
    """What every token of its sequence attends to, [ΣL, D]; None if PyTorch must compute it.

    ``joined`` [ΣL, 3D] are queries, keys and values; ``starts`` [n] are the first tokens of the
    sequences, whose ``longest`` has that many. With the queries ``first`` [n, D] of the first
    tokens, ``joined`` [ΣL, 2D] are keys and values, and the result is [n, D].

    PyTorch must without CUDA or Triton, in single precision, where its own attention is as fast,
    for longer sequences or other widths of heads, and on a GPU that is too small for the gradients.
    """
    width = joined.shape[1] // (3 if first is None else 2)
    suits = (
        joined.dtype in HALVES
        and len(starts) > 0
        and longest <= LONGEST
        and width // heads in HEAD_WIDTHS
        and usable(joined.device, joined.dtype)
    )
    if not suits:
        return None
    from triton.runtime.errors import OutOfResources

    from counterfoil.kernels.triton.packed_attention import attend, on_chip

    if on_chip(longest, width // heads) > shared_memory(joined.device):
        return None
    with torch.cuda.device_of(joined):
        try:
            return attend(joined, starts, longest, heads, dropout, first)
        except OutOfResources:  # the GPU is too small for the kernel
            return None
