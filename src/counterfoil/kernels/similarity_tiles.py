"""Pairwise scores from fragment similarities, tile by tile, forward and backward.

All similarities of a block come from one matrix product; what follows is elementwise or small, and
bound by memory traffic, so it runs on tiles that stay in the cache (or, on a GPU, in the memory at
hand). The backward pass recomputes a tile from its similarities instead of keeping its
intermediate values.

Names: Q asking items with N real fragments each (words, in text-to-image), C answering items with K
fragments each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CPU_TILE = 1 << 18
"""Similarities of a tile on a CPU: a few temporaries of this size fit into a core's cache."""

GPU_TILE = 1 << 26


@dataclass(frozen=True)
class Tile:
    """What a few asking items and a few answering items are scored from.

    All asking items of a tile have the same number of fragments, so there is no padding on their
    side. ``answers`` [C, K] says which answering fragments are real; None: all of them.
    """

    sims_QNCK: Tensor
    asking_QND: Tensor
    gram_CKK: Tensor
    answers_CK: Tensor | None


Score = Callable[[Tile], Tensor]


@dataclass(frozen=True)
class _Span:
    """A tile's place: rows of packed fragments, asking items, answering items."""

    fragments: slice
    asking: slice
    length: int
    answering: slice


def spans(lengths: list[int], answering: int, fragments: int, cells: int) -> Iterator[_Span]:
    """Tiles over asking items sorted by length; each holds items of one length."""
    start = 0
    item = 0
    while item < len(lengths):
        length = lengths[item]
        same = item
        while same < len(lengths) and lengths[same] == length:
            same += 1
        per_item = max(1, length) * fragments
        columns = max(1, min(answering, cells // per_item))
        rows = max(1, cells // (per_item * columns))
        for first in range(item, same, rows):
            last = min(first + rows, same)
            here = slice(start + (first - item) * length, start + (last - item) * length)
            for left in range(0, answering, columns):
                right = min(left + columns, answering)
                yield _Span(here, slice(first, last), length, slice(left, right))
        start += (same - item) * length
        item = same


@dataclass(frozen=True)
class Block:
    """Packed similarities [ΣN, C, K] of asking items sorted by length, and both sides."""

    sims: Tensor
    asking: Tensor  # [ΣN, D]
    gram: Tensor  # [C, K, K]
    answers: Tensor | None  # [C, K]
    lengths: list[int]

    def tile(self, span: _Span) -> Tile:
        count = span.asking.stop - span.asking.start
        shape = (count, span.length)
        sims = self.sims[span.fragments, span.answering]
        return Tile(
            sims.reshape(*shape, *sims.shape[1:]),
            self.asking[span.fragments].reshape(*shape, -1),
            self.gram[span.answering],
            self.answers[span.answering] if self.answers is not None else None,
        )


def score_block(score: Score, block: Block) -> Tensor:
    """Scores [Q, C] of all pairs of a block."""
    tensors = (block.sims, block.asking, block.gram)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _TiledScores.apply(score, block, *tensors)
    return _forward(score, block)


def _spans(block: Block) -> Iterator[_Span]:
    _, answering, fragments = block.sims.shape
    cells = GPU_TILE if block.sims.is_cuda else CPU_TILE
    return spans(block.lengths, answering, fragments, cells)


def _forward(score: Score, block: Block) -> Tensor:
    out = block.sims.new_zeros(len(block.lengths), block.sims.shape[1])
    for span in _spans(block):
        if span.length:  # an item without fragments scores zero
            out[span.asking, span.answering] = score(block.tile(span))
    return out


class _TiledScores(torch.autograd.Function):
    """Scores whose backward pass goes through the same tiles again."""

    @staticmethod
    def forward(
        ctx: Any, score: Score, block: Block, sims: Tensor, asking: Tensor, gram: Tensor
    ) -> Tensor:
        ctx.score = score
        ctx.block = replace(block, sims=sims.detach(), asking=asking.detach(), gram=gram.detach())
        return _forward(score, ctx.block)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        block: Block = ctx.block
        buffers = [torch.zeros_like(x) for x in (block.sims, block.asking, block.gram)]
        for span in _spans(block):
            if not span.length:
                continue
            tile = block.tile(span)
            given = (tile.sims_QNCK, tile.asking_QND, tile.gram_CKK)
            leaves = [x.detach().requires_grad_() for x in given]
            with torch.enable_grad():
                scores = ctx.score(Tile(leaves[0], leaves[1], leaves[2], tile.answers_CK))
            found = torch.autograd.grad(
                scores, leaves, grads[0][span.asking, span.answering], allow_unused=True
            )
            places = (
                buffers[0][span.fragments, span.answering],
                buffers[1][span.fragments],
                buffers[2][span.answering],
            )
            for place, grad in zip(places, found, strict=True):
                if grad is not None:
                    place += grad.reshape(place.shape)
        return None, None, *buffers
