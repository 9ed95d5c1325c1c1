"""Triton kernels of a gated update and its gradients.

A program has a block of numbers of one row of the old values and the query's logits, and goes
through the rows of the context's logits that share it: row, row + rows, row + 2 · rows and so on.
Sums over these are always added in the same order. Offsets have 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(of, at, columns, width, inside):
    """The logits of the gate and of the update of some numbers."""
    start = of + at * 2 * width + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(start + width, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _activated(gate, update):
    """The gate σ(g) and the update tanh(o)."""
    return tl.sigmoid(gate), 2 * tl.sigmoid(2 * update) - 1


@triton.jit
def update(
    old, of_query, of_context, updated, rows, shared_by, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    before = tl.load(old + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    query_gate, query_update = _logits(of_query, row, columns, width, inside)
    for number in range(shared_by):
        at = row + number * rows
        context_gate, context_update = _logits(of_context, at, columns, width, inside)
        gate, new = _activated(query_gate + context_gate, query_update + context_update)
        tl.store(updated + at * width + columns, gate * before + (1 - gate) * new, mask=inside)


@triton.jit
def update_gradients(
    old, of_query, of_context, upstream, d_old, d_query, d_context, rows, shared_by, width,
    SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Not ``SHARED``: the gradients of both logits are equal, and only ``d_context`` is written."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    before = tl.load(old + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    query_gate, query_update = _logits(of_query, row, columns, width, inside)
    total = tl.zeros([BLOCK], tl.float32)
    gate_total = tl.zeros([BLOCK], tl.float32)
    update_total = tl.zeros([BLOCK], tl.float32)
    for number in range(shared_by):
        at = row + number * rows
        context_gate, context_update = _logits(of_context, at, columns, width, inside)
        gate, new = _activated(query_gate + context_gate, query_update + context_update)
        above = tl.load(upstream + at * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += above * gate
        closed = above * (1 - gate)
        d_gate, d_update = closed * gate * (before - new), closed * (1 - new * new)
        start = d_context + at * 2 * width + columns
        tl.store(start, d_gate, mask=inside)
        tl.store(start + width, d_update, mask=inside)
        if SHARED:
            gate_total += d_gate
            update_total += d_update
    tl.store(d_old + row * width + columns, total, mask=inside)
    if SHARED:
        start = d_query + row * 2 * width + columns
        tl.store(start, gate_total, mask=inside)
        tl.store(start + width, update_total, mask=inside)
