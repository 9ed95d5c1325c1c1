"""Triton kernels of a gated update and its gradients.

A program has a block of numbers of one row of the old values, and goes through the rows of logits
that share it: row, row + rows, row + 2 · rows and so on. Sums over these are always added in the
same order. Offsets have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(logits, at, columns, width, inside):
    """The gate σ(g) and the update tanh(o) of some numbers."""
    start = logits + at * 2 * width + columns
    gate = tl.sigmoid(tl.load(start, mask=inside, other=0.0).to(tl.float32))
    update = tl.load(start + width, mask=inside, other=0.0).to(tl.float32)
    return gate, 2 * tl.sigmoid(2 * update) - 1


@triton.jit
def update(old, logits, updated, rows, shared_by, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    before = tl.load(old + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    for number in range(shared_by):
        at = row + number * rows
        gate, new = _activated(logits, at, columns, width, inside)
        tl.store(updated + at * width + columns, gate * before + (1 - gate) * new, mask=inside)


@triton.jit
def update_gradients(
    old, logits, upstream, of_old, of_logits, rows, shared_by, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    before = tl.load(old + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(shared_by):
        at = row + number * rows
        gate, new = _activated(logits, at, columns, width, inside)
        above = tl.load(upstream + at * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += above * gate
        closed = above * (1 - gate)
        start = of_logits + at * 2 * width + columns
        tl.store(start, closed * gate * (before - new), mask=inside)
        tl.store(start + width, closed * (1 - new * new), mask=inside)
    tl.store(of_old + row * width + columns, total, mask=inside)
