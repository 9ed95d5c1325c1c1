"""Triton kernel of MaxSim: products and maxima in one pass, so that no similarity is stored.

A program handles BM query tokens and a few groups of BG documents, step by step. A step multiplies
with BJ tokens of each document of a group. Column j · BG + i of that product is token j of document
i, so the maximum over j is between values of the same thread: the tokens of a document are never
spread over threads, and documents of any length waste at most BJ − 1 columns each.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, rows, columns, width, in_rows, EVEN: tl.constexpr):
    """Rows of vectors [rows, columns]; zeros outside."""
    at = base + rows[:, None] * width + columns[None, :]
    inside = in_rows[:, None]
    if not EVEN:
        inside = inside & (columns[None, :] < width)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def largest_products(
    queries, documents, document_mask, group_lengths, best, best_index,
    tokens, count, longest, width,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, INDEX: tl.constexpr, RESIDENT: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BG: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """For each query token [tokens] and document [count]: the largest product, and its position.

    ``best`` and ``best_index`` are [tokens, count]. A document without real tokens gets 0.
    RAGGED: BJ does not divide the documents' length. EVEN: BD divides the vectors' width.
    RESIDENT: BD covers it, so that query vectors stay on the chip.
    """
    # offsets are from the program's own tokens and group: 32 bits are enough, and take half as
    # many registers
    first_token = tl.program_id(0).to(tl.int64) * BM
    query_block = queries + first_token * width
    w = tl.arange(0, BM)
    there = w < tokens - first_token
    columns = tl.arange(0, BJ * BG)
    token = columns // BG
    member = columns % BG
    dims = tl.arange(0, BD)
    if RESIDENT:
        q = _tile(query_block, w, dims, width, there, EVEN)
    for turn in range(PER):
        group = tl.program_id(1) * PER + turn
        first_document = group.to(tl.int64) * BG
        document_block = documents + first_document * longest * width
        mask_block = document_mask + first_document * longest
        exists = member < count - first_document
        top = tl.full([BM, BG], float("-inf"), tl.float32)
        at = tl.zeros([BM, BG], tl.int32)
        length = tl.load(group_lengths + group, mask=group * BG < count, other=0)
        for start in range(0, length, BJ):
            position = start + token
            rows = member * longest + position
            real = exists & (position < longest)
            if RESIDENT:
                v = _tile(document_block, rows, dims, width, real, EVEN)
                s = tl.dot(q, tl.trans(v), input_precision=PRECISION)
            else:
                s = tl.zeros([BM, BJ * BG], tl.float32)
                for first in range(0, width, BD):
                    q = _tile(query_block, w, first + dims, width, there, EVEN)
                    v = _tile(document_block, rows, first + dims, width, real, EVEN)
                    s = tl.dot(q, tl.trans(v), s, input_precision=PRECISION)
            if MASKED:
                real = real & (tl.load(mask_block + rows, mask=real, other=0) != 0)
            if MASKED or RAGGED:
                s = tl.where(real[None, :], s, float("-inf"))
            by_token = tl.reshape(s, [BM, BJ, BG])
            if INDEX:
                step_top, step_at = tl.max(by_token, 1, return_indices=True)
                at = tl.where(step_top > top, start + step_at, at)
                top = tl.maximum(top, step_top)
            else:
                top = tl.maximum(top, tl.max(by_token, 1))
        document = tl.arange(0, BG)
        cells = first_token * count + first_document + w[:, None] * count + document[None, :]
        inside = there[:, None] & (document < count - first_document)[None, :]
        tl.store(best + cells, tl.where(top == float("-inf"), 0.0, top), mask=inside)
        if INDEX:
            tl.store(best_index + cells, at.to(best_index.dtype.element_ty), mask=inside)
