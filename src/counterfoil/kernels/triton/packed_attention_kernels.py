"""Triton kernels of attention over packed short sequences, and of its gradients.

One program has one head of one sequence: its queries [BQ, WIDTH], keys and values [BK, WIDTH] and
all attention weights [BQ, BK] fit the chip. Nothing is padded in memory, and no two programs write
the same place, so sums are always added in the same order.

Rows of queries and of their gradients are ``query_stride`` apart, those of keys, values and their
gradients ``stride``; attended vectors and the upstream gradient are contiguous. With FIRST_ONLY,
the only query of a sequence is that of its first token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _hash(x):
    """A mixed 32-bit number: two rounds of shifting and multiplying."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _dropout_factors(seed, program, dropout, BQ: tl.constexpr, BK: tl.constexpr):
    """Factors [BQ, BK] of dropout: 0, or 1 / (1 − p), by a hash of seed, program and position."""
    number = tl.load(seed)
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    key = _hash(_hash(program.to(tl.uint32) + low) ^ high)
    position = tl.arange(0, BQ)[:, None] * BK + tl.arange(0, BK)[None, :]
    drawn = _hash(_hash(position.to(tl.uint32) ^ key) + high)
    share = (drawn >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(share >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _sequence_of(starts, count, tokens, HEADS: tl.constexpr, FIRST_ONLY: tl.constexpr):
    """First row and number of this program's queries, the same of its keys, and its head."""
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1, mask=sequence + 1 < count, other=tokens)
    length = (end - start).to(tl.int32)
    if FIRST_ONLY:
        return sequence.to(tl.int64), 1, start.to(tl.int64), length, head
    else:
        return start.to(tl.int64), length, start.to(tl.int64), length, head


@triton.jit
def _rows(start, length, head, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets [BLOCK, WIDTH] of a head's rows, and which of them are real."""
    row = tl.arange(0, BLOCK)
    dims = head * WIDTH + tl.arange(0, WIDTH)
    offsets = start * stride + row[:, None] * stride + dims[None, :]
    return offsets, (row < length)[:, None]


@triton.jit
def _weights(q, k, length, scale, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Attention weights [BQ, BK]; 0 beyond the sequence."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    logits = tl.where((tl.arange(0, BK) < length)[None, :], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit(do_not_specialize=["count", "tokens"])
def attention(
    queries, keys, values, attended, starts, seed,
    count, tokens, query_stride, stride, scale, dropout,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
    FIRST_ONLY: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of a sequence attend to."""
    query_start, query_length, start, length, head = _sequence_of(
        starts, count, tokens, HEADS, FIRST_ONLY
    )
    query_rows, is_query = _rows(query_start, query_length, head, query_stride, WIDTH, BQ)
    rows, real = _rows(start, length, head, stride, WIDTH, BK)
    q = tl.load(queries + query_rows, mask=is_query, other=0.0)
    k = tl.load(keys + rows, mask=real, other=0.0)
    v = tl.load(values + rows, mask=real, other=0.0)
    weights = _weights(q, k, length, scale, BK, PRECISION)
    if DROPS:
        weights = weights * _dropout_factors(seed, tl.program_id(0), dropout, BQ, BK)
    attended_rows = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    out_rows, _ = _rows(query_start, query_length, head, HEADS * WIDTH, WIDTH, BQ)
    tl.store(attended + out_rows, attended_rows.to(v.dtype), mask=is_query)


@triton.jit(do_not_specialize=["count", "tokens"])
def attention_gradients(
    queries, keys, values, upstream, of_queries, of_keys, of_values, starts, seed,
    count, tokens, query_stride, stride, scale, dropout,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
    FIRST_ONLY: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, keys and values of a sequence."""
    query_start, query_length, start, length, head = _sequence_of(
        starts, count, tokens, HEADS, FIRST_ONLY
    )
    query_rows, is_query = _rows(query_start, query_length, head, query_stride, WIDTH, BQ)
    rows, real = _rows(start, length, head, stride, WIDTH, BK)
    out_rows, _ = _rows(query_start, query_length, head, HEADS * WIDTH, WIDTH, BQ)
    q = tl.load(queries + query_rows, mask=is_query, other=0.0)
    k = tl.load(keys + rows, mask=real, other=0.0)
    v = tl.load(values + rows, mask=real, other=0.0)
    above = tl.load(upstream + out_rows, mask=is_query, other=0.0)
    weights = _weights(q, k, length, scale, BK, PRECISION)
    of_weights = tl.dot(above, tl.trans(v), input_precision=PRECISION)
    used = weights
    if DROPS:
        factors = _dropout_factors(seed, tl.program_id(0), dropout, BQ, BK)
        used = weights * factors
        of_weights = of_weights * factors
    of_v = tl.dot(tl.trans(used.to(v.dtype)), above, input_precision=PRECISION)
    tl.store(of_values + rows, of_v.to(v.dtype), mask=real)
    mean = tl.sum(weights * of_weights, 1)
    of_logits = (weights * (of_weights - mean[:, None]) * scale).to(v.dtype)
    of_k = tl.dot(tl.trans(of_logits), q, input_precision=PRECISION)
    tl.store(of_keys + rows, of_k.to(v.dtype), mask=real)
    of_q = tl.dot(of_logits, k, input_precision=PRECISION)
    tl.store(of_queries + query_rows, of_q.to(v.dtype), mask=is_query)
