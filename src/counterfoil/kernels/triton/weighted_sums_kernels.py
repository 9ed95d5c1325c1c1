"""Triton kernels of weighted sums and their gradients.

Values are [before, shared, after, length], weights [before, 1, after, length]. A program has some
rows of the weights, and goes through the values that share them, always in the same order. Offsets
have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(rows, shared_by, after, length, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Of a program's weights: rows, those of the first values that share them, and what is real."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = row // after * shared_by * after + row % after
    column = tl.arange(0, WIDTH)
    return row, first, column, (row < rows)[:, None] & (column < length)[None, :]


@triton.jit
def sums(
    values, weights, result, rows, shared_by, after, length,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, first, column, inside = _places(rows, shared_by, after, length, BLOCK, WIDTH)
    at = row[:, None] * length + column[None, :]
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    for number in range(shared_by):
        here = first + number * after
        at = here[:, None] * length + column[None, :]
        value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + here, tl.sum(value * weight, axis=1), mask=row < rows)


@triton.jit
def gradients(
    values, weights, upstream, d_values, d_weights, rows, shared_by, after, length,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, first, column, inside = _places(rows, shared_by, after, length, BLOCK, WIDTH)
    own = row[:, None] * length + column[None, :]
    weight = tl.load(weights + own, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for number in range(shared_by):
        here = first + number * after
        at = here[:, None] * length + column[None, :]
        above = tl.load(upstream + here, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        total += above * value
        tl.store(d_values + at, above * weight, mask=inside)
    tl.store(d_weights + own, total, mask=inside)
