"""Triton kernels of a MaxSim training step: scores and positions of maxima, and both gradients.

Queries are read with their padding, and masks in the kernels: nothing is packed, and no length goes
to the host. As in `maxsim_kernel`, a step multiplies with BJ tokens of each of BG documents, and
column j · BG + i of a product is token j of document i.

A gradient is the product of a one-hot factor, the upstream gradient of each pair at the position of
its maximum, with the vectors of the other side. The factor is built in registers, from one position
per query token and document; sums are always added in the same order.

Shapes: n queries of q tokens, m documents of k tokens. Positions [n · q, m] are −1 without a
gradient: for masked tokens, and documents without real vectors. Offsets have 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _vectors(base, rows, dims, width, real, EVEN: tl.constexpr):
    """Vectors [rows, dims]; zeros for those that are not real, and beyond the width."""
    inside = real[:, None]
    if not EVEN:
        inside = inside & (dims[None, :] < width)
    return tl.load(base + rows[:, None] * width + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _real(mask, rows, inside, MASKED: tl.constexpr):
    """Which rows are real vectors."""
    if MASKED:
        inside = inside & (tl.load(mask + rows, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _longest(mask, documents, m, k):
    """Number of positions up to the last real vector of some documents."""
    end = 0
    for first in range(0, k, 64):
        token = first + tl.arange(0, 64)
        inside = (documents < m)[:, None] & (token < k)[None, :]
        there = tl.load(mask + documents[:, None] * k + token[None, :], mask=inside, other=0)
        end = tl.maximum(end, tl.max(tl.where(there != 0, token[None, :] + 1, 0)))
    return end


@triton.jit
def scores_and_positions(
    queries, documents, query_mask, document_mask, scores, positions,
    n, q, m, k, width,
    QUERY_MASKED: tl.constexpr, DOCUMENT_MASKED: tl.constexpr, RAGGED: tl.constexpr,
    RESIDENT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Scores [n, m] of BM / BT queries with BG documents, BT tokens of each query at a time.

    RAGGED: BJ does not divide k. EVEN: BD divides the width. RESIDENT: BD covers it, so that query
    vectors stay on the chip.
    """
    groups = tl.cdiv(m, BG)
    first_query = tl.program_id(0) // groups * (BM // BT)
    first_document = tl.program_id(0) % groups * BG
    w = tl.arange(0, BM)
    query = first_query + w // BT
    columns = tl.arange(0, BJ * BG)
    step = columns // BG
    member = first_document + columns % BG
    document = first_document + tl.arange(0, BG)
    dims = tl.arange(0, BD)
    length = k
    if DOCUMENT_MASKED:
        length = _longest(document_mask, document, m, k)
    total = tl.zeros([BM // BT, BG], tl.float32)
    for first_token in range(0, q, BT):
        token = first_token + w % BT
        row = query * q + token
        there = (query < n) & (token < q)
        counts = _real(query_mask, row, there, QUERY_MASKED)
        if RESIDENT:
            u = _vectors(queries, row, dims, width, counts, EVEN)
        top = tl.full([BM, BG], float("-inf"), tl.float32)
        at = tl.zeros([BM, BG], tl.int32)
        # a block of padding alone has no steps
        for start in range(0, length * tl.max(counts.to(tl.int32)), BJ):
            position = start + step
            rows = member * k + position
            real = (member < m) & (position < k)
            real = _real(document_mask, rows, real, DOCUMENT_MASKED)
            if RESIDENT:
                v = _vectors(documents, rows, dims, width, real, EVEN)
                s = tl.dot(u, tl.trans(v), input_precision=PRECISION)
            else:
                s = tl.zeros([BM, BJ * BG], tl.float32)
                for first in range(0, width, BD):
                    u = _vectors(queries, row, first + dims, width, counts, EVEN)
                    v = _vectors(documents, rows, first + dims, width, real, EVEN)
                    s = tl.dot(u, tl.trans(v), s, input_precision=PRECISION)
            if DOCUMENT_MASKED or RAGGED:
                s = tl.where(real[None, :], s, float("-inf"))
            by_token = tl.reshape(s, [BM, BJ, BG])
            step_top = tl.max(by_token, 1)
            # the first position of the maximum, or −1 if there is a NaN, which a maximum skips
            largest = step_top[:, None, :]
            nan_or_less = tl.where(by_token < largest, BJ, -1)
            offset = tl.arange(0, BJ)[None, :, None]
            step_at = tl.min(tl.where(by_token == largest, offset, nan_or_less), 1)
            step_top = tl.where(step_at < 0, float("nan"), step_top)
            at = tl.where(step_top > top, start + step_at, at)
            top = tl.maximum(top, step_top, propagate_nan=tl.PropagateNan.ALL)
        counted = counts[:, None] & (top != float("-inf"))
        inside = there[:, None] & (document < m)[None, :]
        at = tl.where(counted, at, -1).to(positions.dtype.element_ty)
        tl.store(positions + row[:, None] * m + document[None, :], at, mask=inside)
        by_query = tl.reshape(tl.where(counted, top, 0.0), [BM // BT, BT, BG])
        total += tl.sum(by_query, 1)
    query = first_query + tl.arange(0, BM // BT)
    inside = (query < n)[:, None] & (document < m)[None, :]
    tl.store(scores + query[:, None] * m + document[None, :], total, mask=inside)


@triton.jit
def query_gradients(
    documents, document_mask, upstream, positions, gradients,
    tokens, q, m, k, width,
    MASKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BG: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients [tokens, width] of BM query tokens, BD numbers of each; ``tokens`` is n · q."""
    parts = tl.cdiv(width, BD)
    row = tl.program_id(0) // parts * BM + tl.arange(0, BM)
    dims = tl.program_id(0) % parts * BD + tl.arange(0, BD)
    columns = tl.arange(0, BJ * BG)
    total = tl.zeros([BM, BD], tl.float32)
    for first_document in range(0, m, BG):
        document = first_document + tl.arange(0, BG)
        inside = (row < tokens)[:, None] & (document < m)[None, :]
        cells = row[:, None] * m + document[None, :]
        at = tl.load(positions + cells, mask=inside, other=-1).to(tl.int32)
        cells = (row // q)[:, None] * m + document[None, :]
        weight = tl.load(upstream + cells, mask=inside, other=0.0)
        weight = weight.to(documents.dtype.element_ty)
        member = first_document + columns % BG
        for start in range(0, tl.max(at) + 1, BJ):
            position = start + columns // BG
            rows = member * k + position
            real = _real(document_mask, rows, (member < m) & (position < k), MASKED)
            v = _vectors(documents, rows, dims, width, real, EVEN)
            step = start + tl.arange(0, BJ)
            selected = tl.where(at[:, None, :] == step[None, :, None], weight[:, None, :], 0.0)
            selected = tl.reshape(selected, [BM, BJ * BG])
            total = tl.dot(selected, v, total, input_precision=PRECISION)
    inside = (row < tokens)[:, None] & (dims < width)[None, :]
    cells = row[:, None] * width + dims[None, :]
    tl.store(gradients + cells, total.to(gradients.dtype.element_ty), mask=inside)


@triton.jit
def document_gradients(
    queries, query_mask, upstream, positions, gradients,
    tokens, q, m, k, width,
    MASKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BG: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients [m, k, width] of BJ tokens of each of BG documents, BD numbers of each."""
    parts, steps = tl.cdiv(width, BD), tl.cdiv(k, BJ)
    dims = tl.program_id(0) % parts * BD + tl.arange(0, BD)
    start = tl.program_id(0) // parts % steps * BJ
    first_document = tl.program_id(0) // (parts * steps) * BG
    document = first_document + tl.arange(0, BG)
    step = start + tl.arange(0, BJ)
    total = tl.zeros([BJ * BG, BD], tl.float32)
    for first in range(0, tokens, BM):
        row = first + tl.arange(0, BM)
        inside = (document < m)[:, None] & (row < tokens)[None, :]
        cells = row[None, :] * m + document[:, None]
        at = tl.load(positions + cells, mask=inside, other=-1).to(tl.int32)
        cells = (row // q)[None, :] * m + document[:, None]
        weight = tl.load(upstream + cells, mask=inside, other=0.0)
        weight = weight.to(queries.dtype.element_ty)
        selected = tl.where(at[None, :, :] == step[:, None, None], weight[None, :, :], 0.0)
        selected = tl.reshape(selected, [BJ * BG, BM])
        u = _vectors(
            queries, row, dims, width, _real(query_mask, row, row < tokens, MASKED), EVEN
        )  # fmt: skip
        total = tl.dot(selected, u, total, input_precision=PRECISION)
    columns = tl.arange(0, BJ * BG)
    member, position = first_document + columns % BG, start + columns // BG
    inside = ((member < m) & (position < k))[:, None] & (dims < width)[None, :]
    cells = (member * k + position)[:, None] * width + dims[None, :]
    tl.store(gradients + cells, total.to(gradients.dtype.element_ty), mask=inside)
