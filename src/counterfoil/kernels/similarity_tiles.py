"""Pairwise scores from fragment similarities, tile by tile, forward and backward.

All similarities of a block come from one matrix product; what follows is elementwise or small, and
bound by memory traffic, so it runs on tiles that stay in the cache (or, on a GPU, in the memory at
hand). The backward pass recomputes a tile from its similarities instead of keeping its
intermediate values, and where a loss has chosen a few pairs only (a hinge on hardest negatives),
it looks at these alone (`chosen_pairs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.blocks import Block, Score, Sides, Span, Tile, spans
from counterfoil.kernels.chosen_pairs import chosen_pairs, pairs_backward

CPU_TILE = 1 << 18
"""Similarities of a tile on a CPU: a few temporaries of this size fit into a core's cache."""

GPU_TILE = 1 << 26


def score_sides(score: Score, sides: Sides) -> Tensor:
    """Scores [Q, C] of all pairs of two sides."""
    given = (sides.packed, sides.v, sides.norms, sides.gram, sides.kin)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        scores: Tensor = _TiledScores.apply(score, sides, *given)
        return scores
    return _forward(score, sides.block())


def _spans(block: Block) -> Iterator[Span]:
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
    """Scores whose backward pass goes through the same tiles again, or only through some pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Score,
        sides: Sides,
        packed: Tensor,
        v: Tensor,
        norms: Tensor,
        gram: Tensor,
        kin: Tensor | None,
    ) -> Tensor:
        kept = None if kin is None else kin.detach()
        sides = replace(sides, packed=packed, v=v, norms=norms, gram=gram, kin=kept)
        block = sides.block()
        ctx.score, ctx.answers, ctx.lengths = score, sides.answers, sides.lengths
        ctx.save_for_backward(packed, v, block.sims, norms, gram, kept)
        return _forward(score, block)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        packed, v, sims, norms, gram, kin = ctx.saved_tensors
        sides = Sides(packed, norms, kin, v, gram, ctx.answers, ctx.lengths)
        block = Block(sims, norms, gram, kin, ctx.answers, ctx.lengths)
        pairs = chosen_pairs(grads[0]) if kin is None else None
        if pairs is not None:
            return None, None, *pairs_backward(ctx.score, sides, block, pairs, grads[0]), None
        return None, None, *_every_pair_backward(ctx.score, sides, block, grads[0])


def _every_pair_backward(
    score: Score, sides: Sides, block: Block, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of packed, v, norms, gram and kin, tile by tile."""
    into = Block(
        torch.empty_like(block.sims),  # every similarity belongs to exactly one tile
        torch.zeros_like(block.norms),
        torch.zeros_like(block.gram),
        None if block.kin is None else torch.zeros_like(block.kin),
        None,
        block.lengths,
    )
    for span in _spans(block):
        if span.length:
            _tile_backward(score, block, into, span, grad[span.asking, span.answering])
    flat, like = into.sims.flatten(1), into.sims.dtype
    packed = (flat @ sides.v.flatten(0, 1).to(like)).to(sides.packed.dtype)
    v = (flat.T @ sides.packed.to(like)).view_as(sides.v).to(sides.v.dtype)
    return packed, v, into.norms, into.gram, into.kin


def _tile_backward(score: Score, block: Block, into: Block, span: Span, grad: Tensor) -> None:
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
