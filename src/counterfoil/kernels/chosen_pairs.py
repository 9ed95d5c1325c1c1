"""The backward pass of pairwise scores where a loss has chosen a few pairs.

A hinge on the hardest negative gives a gradient to three scores of a row and a column: the
positive, its hardest caption, its hardest image. All other pairs of the batch have none, so what
they were scored from need not be looked at again: with B pairs, 3B of B² are left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.kernels.blocks import Block, Score, Sides, Tile

LARGEST_SHARE = 1 / 8
"""Of pairs with a gradient, up to which they are worth picking out."""

CELLS = 1 << 18
"""Similarities of chosen pairs that are looked at together."""


def chosen_pairs(grad: Tensor) -> Tensor | None:
    """Pairs [P, 2] that have a gradient; None where they are many, or on a GPU.

    There tiles are large and counting would make the host wait for the device.
    """
    if grad.is_cuda:
        return None
    pairs = grad.nonzero()
    return pairs if len(pairs) <= LARGEST_SHARE * grad.numel() else None


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
        for some in same.split(max(1, CELLS // (length * block.sims.shape[2]))):
            asking, answering = some.unbind(1)
            words = starts[asking][:, None] + torch.arange(length)  # [P, N]
            d_sims, d_norms, d_gram = _one_length(
                score, block, words, answering, grad[asking, answering]
            )
            norms.index_add_(0, words.flatten(), d_norms.flatten())
            gram.index_add_(0, answering, d_gram)
            rows.append(words.flatten())
            owners.append(answering.repeat_interleave(length))
            slopes.append(d_sims.flatten(0, 1))
    packed, v = torch.zeros_like(sides.packed), torch.zeros_like(sides.v)
    if rows:
        _into_fragments(sides, packed, v, torch.cat(rows), torch.cat(owners), torch.cat(slopes))
    return packed, v, norms, gram


def _one_length(
    score: Score, block: Block, words: Tensor, answering: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sims [P, N, K], norms [P, N] and gram [P, K, K] of pairs of one length.

    The pairs stand in the place of answering items: each has its own norms, too.
    """
    sims = block.sims[words, answering[:, None]].permute(1, 0, 2)[None].detach()  # [1, N, P, K]
    norms = block.norms[words].T[None].detach()  # [1, N, P]
    leaves = [x.requires_grad_() for x in (sims, norms, block.gram[answering].detach())]
    answers = block.answers[answering] if block.answers is not None else None
    with torch.enable_grad():
        scores = score(Tile(leaves[0], leaves[1], leaves[2], None, answers))
    found = torch.autograd.grad(
        scores, leaves, grad[None].to(scores.dtype), allow_unused=True, materialize_grads=True
    )
    return found[0][0].permute(1, 0, 2), found[1][0].T, found[2]


def _into_fragments(
    sides: Sides, packed: Tensor, v: Tensor, rows: Tensor, owners: Tensor, slopes: Tensor
) -> None:
    """Add what the similarities' gradients say of the fragments on both sides.

    ``slopes`` [R, K] belong to asking fragment ``rows`` and answering item ``owners``. Items are
    taken together with others that have about as many rows, in batched products.
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
            asked = sides.v[items[here]].to(slope.dtype)
            found = (slope @ asked)[real].to(packed.dtype)
            packed.index_add_(0, rows[at][real], found)
            asking = sides.packed[rows[at]].to(slope.dtype)
            v.index_copy_(0, items[here], (slope.transpose(1, 2) @ asking).to(v.dtype))
        size *= 2
