"""Cross-attention between words and regions, without a context vector per pair.

With w the attention weights of a word over an image's regions V, the context v̂ = Σ w_r v_r is
never built: u·v̂ = Σ w_r s_r and ‖v̂‖² = wᵀ(VVᵀ)w (the Gram identity). No tensor of size
pairs × words × D exists, forward or backward. `unit_contexts` is for methods that need one.

Shapes: I images, T texts, W words, R regions, D width; in tiles, Q query items with N fragments
and C key items with K fragments. Queries are texts and keys images, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.tensors.modes import is_exporting
from counterfoil.core.tensors.precision import product_dtype
from counterfoil.kernels.weighted_sums import weighted_sums

EPS = 1e-8

TIE = 1e-5
"""Relative distance below the average at which BFAN still attends to a fragment.

Rounding must not choose among equal weights. A caption of one word attends equally to all regions
it agrees with, and a single fragment equals its own average. The public code drops ties, and
divides zero by zero there.
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
    squared = weighted_sums(torch.bmm(flat, gram_IRR), flat)
    # the square root has no derivative at zero: a word that attends to nothing gets no gradient
    safe = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt()
    norms = torch.where(squared > 0, safe, torch.zeros_like(squared))
    return norms.view(images, texts, words)


def attended_cosine(
    sims_ITWR: Tensor, weights_ITWR: Tensor, gram_IRR: Tensor, word_norms_TW: Tensor
) -> Tensor:
    """Cosine [I, T, W] of each word with its attended context."""
    numerator = weighted_sums(sims_ITWR, weights_ITWR)
    denominator = word_norms_TW[None] * context_norms(weights_ITWR, gram_IRR)
    return numerator / denominator.clamp(min=EPS)


def unit_contexts(weights_ITWR: Tensor, images_IRD: Tensor) -> Tensor:
    """Contexts v̂ / ‖v̂‖ [I, T, W, D] of every word; zero, without a gradient, if v̂ is zero.

    Weights are divided by the norm before the product, as there are far fewer of them than numbers
    of contexts. In half precision the norm is computed in single: its error is that of a whole
    context, which does not average out over channels. Contexts that nearly cancel stay shorter
    where half precision could not hold the quotient.
    """
    images, texts, words, _ = weights_ITWR.shape
    with torch.autocast(images_IRD.device.type, enabled=False):
        fragments = images_IRD.float() if images_IRD.dtype.itemsize < 4 else images_IRD
        norms = context_norms(weights_ITWR.to(fragments.dtype), gram(fragments))
    largest = torch.finfo(product_dtype(images_IRD.dtype, images_IRD.device)).max
    divisor = (norms + EPS).clamp(min=2 / largest).masked_fill(norms == 0, torch.inf)
    scaled = (weights_ITWR / divisor[..., None]).to(images_IRD.dtype)
    return torch.matmul(scaled.flatten(1, 2), images_IRD).view(images, texts, words, -1)


def masked_softmax(logits: Tensor, mask: Tensor | None, dim: int = -1) -> Tensor:
    """Softmax over the entries inside ``mask`` (None: all); zero if the mask is empty.

    The mask is small compared with the logits: adding and multiplying are faster than filling.
    """
    if mask is None:
        return logits.softmax(dim)
    real = mask.to(logits.dtype)
    low = torch.finfo(logits.dtype).min / 2  # half, so that the sum with a logit stays finite
    return (logits + (1 - real) * low).softmax(dim) * real


def l2_over(x: Tensor, dim: int, scale: float = 1.0, eps: float = EPS) -> Tensor:
    """scale · x / (‖x‖ + eps) along one axis; the gradient is finite for x = 0."""
    eps = max(eps, torch.finfo(x.dtype).tiny)  # 1e-8 is 0 in half precision
    squared = x.square().sum(dim, keepdim=True)
    safe = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt()
    return x * (scale / (torch.where(squared > 0, safe, torch.zeros_like(squared)) + eps))


def square(x: Tensor) -> Tensor:
    """x² in the precision of x; autocast would convert to single, and the result back."""
    with torch.autocast(x.device.type, enabled=False):
        return x.square()


def leaky(sims: Tensor) -> Tensor:
    return F.leaky_relu(sims, 0.1)


@torch.no_grad()
def indicator_above(sims: Tensor, threshold: float) -> Tensor:
    """1 if a similarity is above the threshold, else 0; floats multiply faster than booleans."""
    if is_exporting():
        return (sims > threshold).to(sims.dtype)
    return torch.gt(sims, threshold, out=torch.empty_like(sims))


def packed_cosine(
    sims_QNCK: Tensor, weights_QNCK: Tensor, gram_CKK: Tensor, norms_QN: Tensor
) -> Tensor:
    """Cosine [Q, N, C] of each query fragment with its attended context.

    A cosine ignores the scale of the context, so the weights need not sum to one. The norms of
    query fragments may also differ by key item: [Q, N, C].
    """
    numerator = (weights_QNCK * sims_QNCK).sum(-1)
    q, n, c, k = weights_QNCK.shape
    flat = weights_QNCK.reshape(q * n, c, k).transpose(0, 1)  # [C, QN, K]
    squared = (torch.bmm(flat, gram_CKK) * flat).sum(-1).T.reshape(q, n, c)
    empty = squared <= 0  # no attention: cosine 0, and no gradient through the root
    query = norms_QN if norms_QN.ndim == 3 else norms_QN[..., None]
    norms = squared.masked_fill(empty, 1.0).sqrt() * query
    return (numerator / norms.clamp(min=EPS)).masked_fill(empty, 0.0)


@dataclass(frozen=True)
class Tile:
    """The inputs from which a few query items and a few key items are scored.

    All query items of a tile have the same number of fragments, so queries need no padding. An
    exported graph is the exception: there ``query_mask`` [Q, N] marks the real fragments, and
    padded ones are zero. ``key_mask`` [C, K] marks the real key fragments. A mask of None means
    that all are real. ``query_gram``, if needed, holds the inner products of an item's fragments.
    """

    sims_QNCK: Tensor
    norms_QN: Tensor
    gram_CKK: Tensor
    query_gram_QNN: Tensor | None
    key_mask_CK: Tensor | None
    query_mask_QN: Tensor | None = None

    def query_mask(self, ndim: int) -> Tensor | None:
        """The query mask for values [Q, N, ...] of ``ndim`` axes."""
        mask = self.query_mask_QN
        return None if mask is None else mask.view(*mask.shape, *[1] * (ndim - 2))

    def masked_sims(self, low: float) -> Tensor:
        """Similarities [Q, N, C, K] with those of padded keys set to ``low``."""
        if self.key_mask_CK is None:
            return self.sims_QNCK
        return self.sims_QNCK.masked_fill(~self.key_mask_CK, low)


def query_mean(values: Tensor, tile: Tile) -> Tensor:
    """Mean of values [Q, N, ...] over the real query fragments of each item."""
    mask = tile.query_mask(values.ndim)
    if mask is None:
        return values.mean(1)
    return values.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


Score = Callable[[Tile], Tensor]


@dataclass(frozen=True)
class Span:
    """The slices of a tile: rows of packed fragments, query items, key items."""

    fragments: slice
    queries: slice
    length: int
    keys: slice


def spans(lengths: list[int], keys: int, fragments: int, cells: int) -> Iterator[Span]:
    """Tiles over query items sorted by length; each holds items of one length."""
    start = item = 0
    for length, group in groupby(lengths):
        end = item + len(list(group))
        per_item = max(1, length) * fragments
        columns = max(1, min(keys, cells // per_item))
        rows = max(1, cells // (per_item * columns))
        for first in range(item, end, rows):
            last = min(first + rows, end)
            packed = slice(start + (first - item) * length, start + (last - item) * length)
            for left in range(0, keys, columns):
                right = min(left + columns, keys)
                yield Span(packed, slice(first, last), length, slice(left, right))
        start += (end - item) * length
        item = end


@dataclass(frozen=True)
class Block:
    """Packed similarities [ΣN, C, K] of query items sorted by length, with norms and Gram matrices.

    ``norms`` [ΣN] are the L2 norms of the query fragments; ``query_gram`` [Q, N, N], if needed, is
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
    """Both sides of a block: packed query fragments [ΣN, D] and key fragments ``v`` [C, K, D].

    Norms, Gram matrices and lengths are those of `Block`.
    """

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
