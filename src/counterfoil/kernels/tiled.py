"""Pairwise scores from fragment similarities in PyTorch, tile by tile, forward and backward.

All similarities of a block come from one matrix product. What follows is elementwise or small and
bound by memory traffic, so it runs on tiles that stay in the cache (on a GPU: in free memory). The
backward pass recomputes a tile from its similarities instead of keeping intermediate values.

A hinge on the hardest negative gives a gradient to three scores per row and column only: the
positive, its hardest caption and its hardest image. The backward pass then looks at these pairs
alone (`chosen_pairs`): with B pairs, 3B of B² are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.tensors.device import free_on_gpu
from counterfoil.kernels.attention import Block, Score, Sides, Span, Tile, spans
from counterfoil.kernels.first_order import first_order_only

CPU_TILE = 1 << 18
"""Similarities of a tile on a CPU: a few temporaries of this size fit into a core's cache."""

GPU_TILE = 1 << 26


def score_sides(score: Score, sides: Sides) -> Tensor:
    """Scores [Q, C] of all pairs of two sides."""
    given = (sides.packed, sides.v, sides.norms, sides.gram, sides.query_gram)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        scores: Tensor = _TiledScores.apply(score, sides, *given)
        return scores
    return _forward(score, sides.block())


def _spans(block: Block) -> Iterator[Span]:
    _, keys, fragments = block.sims.shape
    cells = GPU_TILE if block.sims.is_cuda else CPU_TILE
    return spans(block.lengths, keys, fragments, cells)


def _forward(score: Score, block: Block) -> Tensor:
    out = block.sims.new_zeros(len(block.lengths), block.sims.shape[1])
    for span in _spans(block):
        if span.length:  # an item without fragments scores zero
            out[span.queries, span.keys] = score(block.tile(span)).to(out.dtype)
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
        query_gram: Tensor | None,
    ) -> Tensor:
        query_gram = None if query_gram is None else query_gram.detach()
        sides = replace(sides, packed=packed, v=v, norms=norms, gram=gram, query_gram=query_gram)
        block = sides.block()
        ctx.score, ctx.key_mask, ctx.lengths = score, sides.key_mask, sides.lengths
        ctx.save_for_backward(packed, v, block.sims, norms, gram, query_gram)
        return _forward(score, block)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        packed, v, sims, norms, gram, query_gram = ctx.saved_tensors
        sides = Sides(packed, norms, query_gram, v, gram, ctx.key_mask, ctx.lengths)
        block = Block(sims, norms, gram, query_gram, ctx.key_mask, ctx.lengths)
        pairs = chosen_pairs(grads[0]) if query_gram is None else None
        if pairs is not None:
            return None, None, *pairs_backward(ctx.score, sides, block, pairs, grads[0]), None
        return None, None, *_every_pair_backward(ctx.score, sides, block, grads[0])


def _every_pair_backward(
    score: Score, sides: Sides, block: Block, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of packed, v, norms, gram and query_gram, tile by tile."""
    into = Block(
        torch.empty_like(block.sims),  # every similarity belongs to exactly one tile
        torch.zeros_like(block.norms),
        torch.zeros_like(block.gram),
        None if block.query_gram is None else torch.zeros_like(block.query_gram),
        None,
        block.lengths,
    )
    for span in _spans(block):
        if span.length:
            _tile_backward(score, block, into, span, grad[span.queries, span.keys])
    flat, like = into.sims.flatten(1), into.sims.dtype
    packed = (flat @ sides.v.flatten(0, 1).to(like)).to(sides.packed.dtype)
    v = (flat.T @ sides.packed.to(like)).view_as(sides.v).to(sides.v.dtype)
    return packed, v, into.norms, into.gram, into.query_gram


def _tile_backward(score: Score, block: Block, into: Block, span: Span, grad: Tensor) -> None:
    """Recompute one tile with gradients, and write these into those of the block."""
    tile, n = block.tile(span), span.length
    given = [tile.sims_QNCK, tile.norms_QN, tile.gram_CKK]
    given += [tile.query_gram_QNN] if tile.query_gram_QNN is not None else []
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        query_gram = leaves[3] if len(leaves) > 3 else None
        scores = score(Tile(leaves[0], leaves[1], leaves[2], query_gram, tile.key_mask_CK))
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(
        scores, leaves, grad.to(scores.dtype), allow_unused=True
    )
    sims = into.sims[span.fragments, span.keys]
    if grads[0] is None:
        sims.zero_()
    else:
        sims.copy_(grads[0].reshape(sims.shape))
    if grads[1] is not None:
        into.norms[span.fragments] += grads[1].reshape(-1)
    if grads[2] is not None:
        into.gram[span.keys] += grads[2]
    if into.query_gram is not None and grads[3] is not None:
        into.query_gram[span.queries, :n, :n] += grads[3]


MAX_CHOSEN_SHARE = 1 / 8
"""Largest share of pairs with a gradient for which the sparse backward pass pays off."""

CHOSEN_PAIR_CELLS = 1 << 18
"""Similarities of selected pairs that are processed at a time."""


def chosen_pairs(grad: Tensor) -> Tensor | None:
    """Pairs [P, 2] with a nonzero gradient; None if there are many, or on a GPU.

    On a GPU tiles are large, and counting would need a host sync.
    """
    if grad.is_cuda:
        return None
    pairs = grad.nonzero()
    return pairs if len(pairs) <= MAX_CHOSEN_SHARE * grad.numel() else None


def pairs_backward(
    score: Score, sides: Sides, block: Block, pairs: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of packed, v, norms and gram from the chosen pairs alone."""
    lengths = torch.tensor(block.lengths)
    starts = lengths.cumsum(0) - lengths
    norms, gram = torch.zeros_like(block.norms), torch.zeros_like(block.gram)
    rows: list[Tensor] = []
    owners: list[Tensor] = []
    slopes: list[Tensor] = []
    of_pair = lengths[pairs[:, 0]]
    for length in of_pair.unique().tolist():
        if not length:
            continue
        same = pairs[of_pair == length]
        for part in same.split(max(1, CHOSEN_PAIR_CELLS // (length * block.sims.shape[2]))):
            query, keys = part.unbind(1)
            words = starts[query][:, None] + torch.arange(length)  # [P, N]
            d_sims, d_norms, d_gram = _one_length(score, block, words, keys, grad[query, keys])
            norms.index_add_(0, words.flatten(), d_norms.flatten())
            gram.index_add_(0, keys, d_gram)
            rows.append(words.flatten())
            owners.append(keys.repeat_interleave(length))
            slopes.append(d_sims.flatten(0, 1))
    packed, v = torch.zeros_like(sides.packed), torch.zeros_like(sides.v)
    if rows:
        _into_fragments(sides, packed, v, torch.cat(rows), torch.cat(owners), torch.cat(slopes))
    return packed, v, norms, gram


def _one_length(
    score: Score, block: Block, words: Tensor, keys: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sims [P, N, K], norms [P, N] and gram [P, K, K] of pairs of one length.

    The pairs take the axis of the key items, so that norms differ by pair.
    """
    sims = block.sims[words, keys[:, None]].permute(1, 0, 2)[None].detach()  # [1, N, P, K]
    norms = block.norms[words].T[None].detach()  # [1, N, P]
    leaves = [x.requires_grad_() for x in (sims, norms, block.gram[keys].detach())]
    key_mask = block.key_mask[keys] if block.key_mask is not None else None
    with torch.enable_grad():
        scores = score(Tile(leaves[0], leaves[1], leaves[2], None, key_mask))
    d_sims, d_norms, d_gram = torch.autograd.grad(
        scores, leaves, grad[None].to(scores.dtype), allow_unused=True, materialize_grads=True
    )
    return d_sims[0].permute(1, 0, 2), d_norms[0].T, d_gram


def _into_fragments(
    sides: Sides, packed: Tensor, v: Tensor, rows: Tensor, owners: Tensor, slopes: Tensor
) -> None:
    """Propagate the gradients of similarities to the fragments of both sides.

    ``slopes`` [R, K] belong to query fragment ``rows`` and key item ``owners``. Items with a
    similar number of rows share a batched product.
    """
    order = owners.argsort(stable=True)
    rows, owners, slopes = rows[order], owners[order], slopes[order]
    items, counts = owners.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    size = 1
    while size < 2 * int(counts.max()):
        here = ((counts <= size) & (2 * counts > size)).nonzero()[:, 0]
        if len(here):
            places = torch.arange(size)[None, :]
            real = places < counts[here, None]
            at = (starts[here, None] + places).clamp(max=len(rows) - 1)  # [B, size]
            slope = slopes[at] * real[..., None]
            keys = sides.v[items[here]].to(slope.dtype)
            d_packed = (slope @ keys)[real].to(packed.dtype)
            packed.index_add_(0, rows[at][real], d_packed)
            query = sides.packed[rows[at]].to(slope.dtype)
            v.index_copy_(0, items[here], (slope.transpose(1, 2) @ query).to(v.dtype))
        size *= 2


CPU_CELLS = 1 << 22
"""Cells (word-region similarities) of a tile on a CPU: small enough to stay near the caches."""

GPU_SHARE = 0.25
"""Part of the free GPU memory that one tile's temporaries may take."""


@dataclass(frozen=True)
class TilePlan:
    """Rows (images) and columns (texts) of a tile."""

    rows: int
    columns: int


def tile_cells(floats_per_cell: int, device: torch.device) -> int:
    """The most cells of a tile whose temporaries fit, at ``floats_per_cell`` numbers each."""
    if device.type == "cuda":
        return int(free_on_gpu(device) * GPU_SHARE) // (4 * max(1, floats_per_cell))
    return CPU_CELLS * 8 // max(8, floats_per_cell)


def plan_tiles(
    n_rows: int, n_columns: int, cells_per_pair: int, floats_per_cell: int, device: torch.device
) -> TilePlan:
    """The largest tile whose temporaries fit.

    ``cells_per_pair`` is words × regions, ``floats_per_cell`` how many numbers a matcher holds for
    each of them at once.
    """
    cells = tile_cells(floats_per_cell, device)
    pairs = max(1, cells // max(1, cells_per_pair))
    rows = max(1, min(n_rows, pairs))
    return TilePlan(rows, max(1, min(n_columns, pairs // rows)))
