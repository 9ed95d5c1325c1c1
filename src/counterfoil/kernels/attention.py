"""Word-region similarities and attention over them, without a context vector per pair.

With w the weights of a word over an image's regions V, the context v̂ = Σ w_r v_r never needs to
exist: u·v̂ = Σ w_r s_r and ‖v̂‖² = wᵀ(VVᵀ)w (the Gram identity), so nothing of size
pairs × words × D is built, forward or backward.

Shapes: I images, T texts, W words, R regions, D width; in tiles, Q query items with N fragments
and C key items with K fragments (texts ask images, or images texts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-8

TIE = 1e-5
"""As far below the average a fragment may be, in parts of it, that BFAN still attends to.

Rounding must not choose among equals: a caption of one word attends alike to all regions it agrees
with, and a lone fragment is its own average; the public code, which drops ties, divides zero by
zero there.
"""


def similarities(images_IRD: Tensor, texts_TWD: Tensor) -> Tensor:
    """Inner products [I, T, W, R] of every word with every region."""
    texts, words, _ = texts_TWD.shape
    flat = torch.matmul(texts_TWD.flatten(0, 1)[None], images_IRD.transpose(1, 2))  # [I, TW, R]
    return flat.view(images_IRD.shape[0], texts, words, images_IRD.shape[1])


def gram(fragments: Tensor) -> Tensor:
    """Inner products of an item's fragments with each other: [B, N, D] to [B, N, N]."""
    return fragments @ fragments.transpose(1, 2)


def context_norms(weights_ITWR: Tensor, gram_IRR: Tensor) -> Tensor:
    """‖Σ w_r v_r‖ of every word: [I, T, W]."""
    images, texts, words, regions = weights_ITWR.shape
    flat = weights_ITWR.reshape(images, texts * words, regions)
    squared = (torch.bmm(flat, gram_IRR) * flat).sum(-1)
    # the square root has no slope at zero: a word that attends to nothing gets no gradient
    safe = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt()
    norms = torch.where(squared > 0, safe, torch.zeros_like(squared))
    return norms.view(images, texts, words)


def attended_cosine(
    sims_ITWR: Tensor, weights_ITWR: Tensor, gram_IRR: Tensor, word_norms_TW: Tensor
) -> Tensor:
    """Cosine [I, T, W] of each word with the context its weights make."""
    numerator = (weights_ITWR * sims_ITWR).sum(-1)
    denominator = word_norms_TW[None] * context_norms(weights_ITWR, gram_IRR)
    return numerator / denominator.clamp(min=EPS)


def masked_softmax(logits: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the entries where ``mask`` holds; all zero where it holds nowhere.

    The mask is small and the logits are many: adding and multiplying are faster than filling.
    """
    real = mask.to(logits.dtype)
    low = torch.finfo(logits.dtype).min / 2  # half, as a sum of both must not overflow
    return (logits + (1 - real) * low).softmax(dim) * real


def l2_over(x: Tensor, dim: int, scale: float = 1.0, eps: float = EPS) -> Tensor:
    """scale · x / (‖x‖ + eps) along one axis; finite gradient where all of it is zero."""
    squared = x.square().sum(dim, keepdim=True)
    safe = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt()
    return x * (scale / (torch.where(squared > 0, safe, torch.zeros_like(squared)) + eps))


def leaky(sims: Tensor) -> Tensor:
    return F.leaky_relu(sims, 0.1)


def packed_cosine(
    sims_QNCK: Tensor, weights_QNCK: Tensor, gram_CKK: Tensor, norms_QN: Tensor
) -> Tensor:
    """Cosine [Q, N, C] of each query fragment with the context its weights make.

    A cosine does not see the scale of the context, so the weights need not add up to one. The norms
    of query fragments may differ by key item, too: [Q, N, C].
    """
    numerator = (weights_QNCK * sims_QNCK).sum(-1)
    q, n, c, k = weights_QNCK.shape
    flat = weights_QNCK.reshape(q * n, c, k).transpose(0, 1)  # [C, QN, K]
    squared = (torch.bmm(flat, gram_CKK) * flat).sum(-1).T.reshape(q, n, c)
    nothing = squared <= 0  # attends to nothing: cosine 0, and no gradient through the root
    query = norms_QN if norms_QN.ndim == 3 else norms_QN[..., None]
    norms = squared.masked_fill(nothing, 1.0).sqrt() * query
    return (numerator / norms.clamp(min=EPS)).masked_fill(nothing, 0.0)


def key_softmax(logits_QNCK: Tensor, key_mask_CK: Tensor | None) -> Tensor:
    """Softmax over the real key fragments; None means that all are real."""
    if key_mask_CK is None:
        return logits_QNCK.softmax(-1)
    return masked_softmax(logits_QNCK, key_mask_CK)


@dataclass(frozen=True)
class Tile:
    """What a few query items and a few key items are scored from.

    All query items of a tile have the same number of fragments, so there is no padding on their
    side, except in an exported graph: there ``query_mask`` [Q, N] says which are real, and padded
    ones are zero. ``key_mask`` [C, K] says which key fragments are real. None means all of them.
    ``query_gram`` are the inner products of a query item's fragments with each other, if needed.
    """

    sims_QNCK: Tensor
    norms_QN: Tensor
    gram_CKK: Tensor
    query_gram_QNN: Tensor | None
    key_mask_CK: Tensor | None
    query_mask_QN: Tensor | None = None

    @property
    def query_mask_QNC(self) -> Tensor | None:
        """The mask for what each query fragment is worth to each key item."""
        return None if self.query_mask_QN is None else self.query_mask_QN[..., None]


def query_mean(values: Tensor, tile: Tile) -> Tensor:
    """Mean of values [Q, N, ...] over the real query fragments of each item."""
    mask = tile.query_mask_QN
    if mask is None:
        return values.mean(1)
    mask = mask.view(*mask.shape, *[1] * (values.ndim - 2))
    return values.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


Score = Callable[[Tile], Tensor]


@dataclass(frozen=True)
class Span:
    """A tile's place: rows of packed fragments, query items, key items."""

    fragments: slice
    queries: slice
    length: int
    keys: slice


def spans(lengths: list[int], keys: int, fragments: int, cells: int) -> Iterator[Span]:
    """Tiles over query items sorted by length; each holds items of one length."""
    start = 0
    item = 0
    while item < len(lengths):
        length = lengths[item]
        same = item
        while same < len(lengths) and lengths[same] == length:
            same += 1
        per_item = max(1, length) * fragments
        columns = max(1, min(keys, cells // per_item))
        rows = max(1, cells // (per_item * columns))
        for first in range(item, same, rows):
            last = min(first + rows, same)
            here = slice(start + (first - item) * length, start + (last - item) * length)
            for left in range(0, keys, columns):
                right = min(left + columns, keys)
                yield Span(here, slice(first, last), length, slice(left, right))
        start += (same - item) * length
        item = same


@dataclass(frozen=True)
class Block:
    """Packed similarities [ΣN, C, K] of query items sorted by length, and both sides.

    ``norms`` [ΣN] are the lengths of the query fragments; ``query_gram`` [Q, N, N], if needed, is
    padded to the longest item.
    """

    sims: Tensor
    norms: Tensor
    gram: Tensor
    query_gram: Tensor | None
    key_mask: Tensor | None
    lengths: list[int]

    def tile(self, span: Span) -> Tile:
        n = span.length
        shape = (span.queries.stop - span.queries.start, n)
        sims = self.sims[span.fragments, span.keys]
        return Tile(
            sims.reshape(*shape, *sims.shape[1:]),
            self.norms[span.fragments].reshape(shape),
            self.gram[span.keys],
            self.query_gram[span.queries, :n, :n] if self.query_gram is not None else None,
            self.key_mask[span.keys] if self.key_mask is not None else None,
        )


@dataclass(frozen=True)
class Sides:
    """Both sides of a block: packed query fragments [ΣN, D] with what `Block` says of them, and
    key fragments [C, K, D] with their Gram matrices."""

    packed: Tensor
    norms: Tensor
    query_gram: Tensor | None
    v: Tensor
    gram: Tensor
    key_mask: Tensor | None
    lengths: list[int]

    def block(self) -> Block:
        sims = (self.packed @ self.v.flatten(0, 1).T).view(len(self.packed), *self.v.shape[:2])
        return Block(sims, self.norms, self.gram, self.query_gram, self.key_mask, self.lengths)
