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
    side. ``answers`` [C, K] says which answering fragments are real; None: all of them. ``kin``
    are the inner products of an asking item's fragments with each other, where wanted.
    """

    sims_QNCK: Tensor
    norms_QN: Tensor
    gram_CKK: Tensor
    kin_QNN: Tensor | None
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
    """Packed similarities [ΣN, C, K] of asking items sorted by length, and both sides.

    ``norms`` [ΣN] are the lengths of the asking fragments; ``kin`` [Q, N, N], where wanted, is
    padded to the longest item.
    """

    sims: Tensor
    norms: Tensor
    gram: Tensor
    kin: Tensor | None
    answers: Tensor | None
    lengths: list[int]

    def tile(self, span: _Span) -> Tile:
        n = span.length
        shape = (span.asking.stop - span.asking.start, n)
        sims = self.sims[span.fragments, span.answering]
        return Tile(
            sims.reshape(*shape, *sims.shape[1:]),
            self.norms[span.fragments].reshape(shape),
            self.gram[span.answering],
            self.kin[span.asking, :n, :n] if self.kin is not None else None,
            self.answers[span.answering] if self.answers is not None else None,
        )


def score_block(score: Score, block: Block) -> Tensor:
    """Scores [Q, C] of all pairs of a block."""
    given = (block.sims, block.norms, block.gram, block.kin)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        scores: Tensor = _TiledScores.apply(score, block, *given)
        return scores
    return _forward(score, block)


def _spans(block: Block) -> Iterator[_Span]:
    _, answering, fragments = block.sims.shape
    cells = GPU_TILE if block.sims.is_cuda else CPU_TILE
    return spans(block.lengths, answering, fragments, cells)


def _forward(score: Score, block: Block) -> Tensor:
    out = block.sims.new_zeros(len(block.lengths), block.sims.shape[1])
    for span in _spans(block):
        if span.length:  # an item without fragments scores zero
            out[span.asking, span.answering] = score(block.tile(span)).to(out.dtype)
    return out


class _TiledScores(torch.autograd.Function):
    """Scores whose backward pass goes through the same tiles again."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Score,
        block: Block,
        sims: Tensor,
        norms: Tensor,
        gram: Tensor,
        kin: Tensor | None,
    ) -> Tensor:
        kept = None if kin is None else kin.detach()
        ctx.score, ctx.block = score, replace(block, sims=sims, norms=norms, gram=gram, kin=kept)
        ctx.save_for_backward(sims, norms, gram, kept)
        return _forward(score, ctx.block)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sims, norms, gram, kin = ctx.saved_tensors
        block: Block = replace(ctx.block, sims=sims, norms=norms, gram=gram, kin=kin)
        into = Block(
            torch.empty_like(sims),  # every similarity belongs to exactly one tile
            torch.zeros_like(norms),
            torch.zeros_like(gram),
            None if kin is None else torch.zeros_like(kin),
            None,
            block.lengths,
        )
        for span in _spans(block):
            if span.length:
                _tile_backward(ctx.score, block, into, span, grads[0][span.asking, span.answering])
        return None, None, into.sims, into.norms, into.gram, into.kin


def _tile_backward(score: Score, block: Block, into: Block, span: _Span, grad: Tensor) -> None:
    """Recompute one tile with gradients, and put these where they belong."""
    tile, n = block.tile(span), span.length
    given = [tile.sims_QNCK, tile.norms_QN, tile.gram_CKK]
    given += [tile.kin_QNN] if tile.kin_QNN is not None else []
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        kin = leaves[3] if len(leaves) > 3 else None
        scores = score(Tile(leaves[0], leaves[1], leaves[2], kin, tile.answers_CK))
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        scores, leaves, grad.to(scores.dtype), allow_unused=True
    )
    place = into.sims[span.fragments, span.answering]
    if found[0] is None:
        place.zero_()
    else:
        place.copy_(found[0].reshape(place.shape))
    if found[1] is not None:
        into.norms[span.fragments] += found[1].reshape(-1)
    if found[2] is not None:
        into.gram[span.answering] += found[2]
    if into.kin is not None and found[3] is not None:
        into.kin[span.asking, :n, :n] += found[3]
