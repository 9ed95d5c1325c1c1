"""MaxSim: late interaction of two sets of vectors, as in ColBERT and ColPali.

The score of a query with a document is Σ over the query's vectors of the largest inner product with
a vector of the document. Similarities are never stored: the largest product of each query vector
with each document is computed by a fused kernel (`triton.maxsim`) or block by block in PyTorch. The
backward pass knows each maximum's position, and gives its gradient to that one pair of vectors.
Small batches with gradients have kernels of their own (`triton.maxsim_training`), without packing.

Shapes: n queries of q tokens, m documents of k tokens, D width; W real tokens of all queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError
from counterfoil.core.tensors.precision import product_dtype
from counterfoil.kernels.first_order import first_order_only
from counterfoil.kernels.spec import KernelSpec, usable

CPU_CELLS, GPU_CELLS = 1 << 22, 1 << 27
"""Similarities of a block in PyTorch, and cells of the one-hot gradient in the backward pass."""

CPU_BUFFER, GPU_BUFFER = 1 << 27, 1 << 30
"""Bytes of maxima held at once, before they are summed over the tokens of each query."""

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
) -> Tensor:
    """MaxSim scores [n, m] of every query [n, q, D] with every document [m, k, D].

    Each vector of a query counts with its largest inner product with the document's vectors; their
    sum is the score. Vectors are not normalized here. Masks [n, q] and [m, k] are boolean, True for
    a real vector; without one, all are real. A query or document without real vectors scores 0.
    Masked vectors may hold anything; a NaN in a real vector makes the item's scores NaN.

    Scores are in single precision, for double precision in double. With gradients to both sides; of
    equal maxima, the first one gets the gradient. On a GPU (compute capability 8.0 or later, with
    Triton) one kernel multiplies and compares; elsewhere, PyTorch does it in blocks.

    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[0.5, 0.1], [0.2, 0.3]], [[1.0, 0.0], [9.0, 9.0]]])
    >>> maxsim(queries, documents, document_mask=torch.tensor([[True, True], [True, False]]))
    tensor([[0.8000, 1.0000]])
    """
    _check(queries, documents, query_mask, document_mask)
    wide = torch.promote_types(queries.dtype, documents.dtype)
    dtype = product_dtype(wide, queries.device)
    queries, documents = queries.to(dtype), documents.to(dtype)
    with_gradient = torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad)
    if with_gradient:
        fused = _try_fused_training(queries, documents, query_mask, document_mask)
        if fused is not None:
            return fused
    tokens = _Tokens.of(queries, query_mask)
    packed = queries.flatten(0, 1)
    if tokens.rows is not None:
        packed = packed.index_select(0, tokens.rows)
    with torch.autocast(queries.device.type, enabled=False):
        if with_gradient:
            scores: Tensor = _MaxSim.apply(packed, documents, tokens, document_mask)
            return scores
        return _scores(packed, documents, tokens, document_mask, with_index=False)[0]


@dataclass(frozen=True)
class _Tokens:
    """The real tokens of queries: their positions (None: all), and lengths [n] of the queries."""

    rows: Tensor | None
    lengths: Tensor

    @classmethod
    def of(cls, queries: Tensor, mask: Tensor | None) -> _Tokens:
        n, q, _ = queries.shape
        if mask is None:
            return cls(None, torch.full((n,), q, device=queries.device))
        return cls(mask.flatten().nonzero()[:, 0], mask.sum(1))

    def total(self, values: Tensor) -> Tensor:
        """Sums [n, …] over the tokens of each query, always added in the same order."""
        if not len(values):
            return values.new_zeros(len(self.lengths), *values.shape[1:])
        return torch.segment_reduce(
            values, "sum", lengths=self.lengths, axis=0, unsafe=True, initial=0
        )

    def owners(self, tokens: int) -> Tensor:
        """The query [W] that each of the tokens belongs to."""
        numbers = torch.arange(len(self.lengths), device=self.lengths.device)
        return numbers.repeat_interleave(self.lengths, output_size=tokens)


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, documents: Tensor, tokens: _Tokens, mask: Tensor | None
    ) -> Tensor:
        scores, index = _scores(packed, documents, tokens, mask, with_index=True)
        ctx.tokens = tokens
        ctx.save_for_backward(packed, documents, index, mask)
        return scores

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        packed, documents, index, mask = ctx.saved_tensors
        longest = documents.shape[1]
        wide = torch.promote_types(packed.dtype, torch.float32)
        # on a CPU, products of halves would be rounded to halves before they are summed
        dtype = packed.dtype if packed.is_cuda else wide
        if mask is not None:  # a document without tokens scores 0, whatever is stored
            grad = grad.masked_fill(~mask.any(1), 0.0)
        grad, owners = grad.to(dtype), ctx.tokens.owners(len(packed))
        d_packed = torch.zeros_like(packed, dtype=wide)
        d_documents = torch.zeros_like(documents)
        if not index.numel() or not longest:
            return d_packed.to(packed.dtype), d_documents, None, None
        for part, blocks in _blocks(packed, documents):
            keys = _without_padding(documents[part], _rows(mask, part)).flatten(0, 1).to(dtype)
            d_keys = torch.zeros_like(keys, dtype=wide)
            for rows in blocks:
                # a one-hot factor for each maximum: the sums over pairs are then two matrix
                # products, faster than adding vectors one by one, and in a fixed order
                d_sims = grad.new_zeros(rows.stop - rows.start, part.stop - part.start, longest)
                d_best = grad[:, part].index_select(0, owners[rows])
                d_sims.scatter_(2, index[rows, part, None].long(), d_best[:, :, None])
                d_sims = d_sims.flatten(1)
                d_packed[rows] += d_sims @ keys
                d_keys += d_sims.T @ packed[rows].to(dtype)
            d_documents[part] = d_keys.view(part.stop - part.start, *documents.shape[1:])
        return d_packed.to(packed.dtype), d_documents, None, None


def _scores(
    packed: Tensor, documents: Tensor, tokens: _Tokens, mask: Tensor | None, with_index: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores [n, m] and, ``with_index``, the positions of maxima [W, m]."""
    packed, documents = packed.contiguous(), documents.contiguous()
    mask = mask.contiguous() if mask is not None else None
    scores, indices = [], []
    limit = GPU_BUFFER if packed.is_cuda else CPU_BUFFER
    for part in _parts(len(documents), 4 * max(1, len(packed)), limit):
        block = packed, documents[part], _rows(mask, part)
        fused = _try_fused_maxima(*block, with_index)
        best, index = fused or torch_maxima(*block, with_index)
        total = tokens.total(best)
        if fused:
            total.masked_fill_(_nan_pairs(*block, tokens), torch.nan)
        scores.append(total)
        if index is not None:
            indices.append(index)
    if len(scores) == 1:
        return scores[0], indices[0] if with_index else None
    return torch.cat(scores, 1), torch.cat(indices, 1) if with_index else None


MAX_EXPONENT = 60.0
"""Exponents up to which exponentials and their sums neither overflow nor vanish."""


def pooled_maxima(
    spec: KernelSpec, words: Tensor, lengths: Tensor, images: Tensor, mask: Tensor | None
) -> Tensor:
    """CHAN's scores [I, T] without gradients: each word's largest product, pooled by caption.

    ``words`` [W, D] are those of all captions, in order, ``lengths`` [T] their numbers, none of
    them 0; ``images`` [I, R, D]. Raises OutOfResources if the GPU is too small for the kernel.
    """
    from counterfoil.kernels.triton.maxsim import fused_maxima

    longest = images.float().norm(dim=-1).amax() * words.float().norm(dim=-1).amax()
    exponent = float(spec.lse_scale * longest) if spec.pooling in ("lse", "softmax") else 0.0
    words, images = words.contiguous(), images.contiguous()
    scores = words.new_empty(len(images), len(lengths), dtype=torch.float32)
    for part in _parts(len(images), 4 * len(words), GPU_BUFFER):
        real = _rows(mask, part)
        real = None if real is None else real.contiguous()
        best, _ = fused_maxima(words, images[part], real, with_index=False)
        scores[part] = _pooled(spec, best, lengths, exponent < MAX_EXPONENT).T
    return scores if spec.factor == 1.0 else scores * spec.factor


def _pooled(spec: KernelSpec, best: Tensor, lengths: Tensor, small: bool) -> Tensor:
    """Maxima [W, I] pooled over the words of each caption [T, I]; ``best`` is overwritten.

    If exponents are ``small``, nothing needs to be subtracted from them.
    """

    def reduced(values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)

    if spec.pooling not in ("lse", "softmax"):
        return reduced(best, spec.pooling)
    top = None if small else reduced(best, "max")
    plain = best.clone() if spec.pooling == "softmax" else None
    if top is not None:
        best -= top.repeat_interleave(lengths, 0, output_size=len(best))
    weights = best.mul_(spec.lse_scale).exp_()
    total = reduced(weights, "sum")
    if plain is not None:
        return reduced(weights.mul_(plain), "sum") / total
    pooled = total.log_().div_(spec.lse_scale)
    return pooled if top is None else pooled + top


def _try_fused_maxima(
    packed: Tensor, documents: Tensor, mask: Tensor | None, with_index: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Largest products [W, m] and, ``with_index``, their positions; None if no kernel can run."""
    if packed.numel() and documents.numel() and usable(packed.device, packed.dtype):
        from triton.runtime.errors import OutOfResources

        from counterfoil.kernels.triton.maxsim import fits, fused_maxima

        if fits(*documents.shape[1:]):
            try:
                with torch.cuda.device_of(packed):
                    return fused_maxima(packed, documents, mask, with_index)
            except OutOfResources:  # the GPU is too small for the kernel
                pass
    return None


def _try_fused_training(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None
) -> Tensor | None:
    """Scores [n, m] of a batch with gradients, by three kernels; None for a large job."""
    if usable(queries.device, queries.dtype):
        from triton.runtime.errors import OutOfResources

        from counterfoil.kernels.triton import maxsim_training as training

        if training.fits(queries, documents):
            try:
                return training.scores_with_gradient(queries, documents, query_mask, document_mask)
            except OutOfResources:  # the GPU is too small for the kernel
                pass
    return None


def _nan_pairs(packed: Tensor, documents: Tensor, mask: Tensor | None, tokens: _Tokens) -> Tensor:
    """Which pairs [n, m] have a NaN in a real vector: the kernel's maxima skip NaN.

    A vector's sum is NaN if one of its numbers is, and sums read the vectors only once. A pair
    without tokens on either side scores 0 nevertheless.
    """
    query_nan = tokens.total(packed.sum(-1, dtype=torch.float32).isnan().float()) > 0
    vector_nan = documents.sum(-1, dtype=torch.float32).isnan()
    if mask is None:
        return query_nan[:, None] | (vector_nan.any(1) & (tokens.lengths > 0)[:, None])
    document_nan = (vector_nan & mask).any(1)
    return (query_nan[:, None] & mask.any(1)) | (document_nan & (tokens.lengths > 0)[:, None])


def torch_maxima(
    packed: Tensor, documents: Tensor, mask: Tensor | None, with_index: bool
) -> tuple[Tensor, Tensor | None]:
    """Largest products [W, m] and, ``with_index``, their positions, block by block in PyTorch."""
    count, longest, _ = documents.shape
    # products of halves would be rounded to halves before they are summed, or overflow
    wide = torch.promote_types(packed.dtype, torch.float32)
    best = packed.new_zeros(len(packed), count, dtype=wide)
    index = torch.zeros_like(best, dtype=torch.int32) if with_index else None
    if not best.numel() or not longest:
        return best, index
    for part, blocks in _blocks(packed, documents):
        keys = documents[part].flatten(0, 1).to(wide)
        real = _rows(mask, part)
        for rows in blocks:
            sims = (packed[rows].to(wide) @ keys.T).view(rows.stop - rows.start, -1, longest)
            if real is not None:
                sims.masked_fill_(~real, -torch.inf)
            if index is None:
                best[rows, part] = sims.amax(2)
            else:
                best[rows, part], index[rows, part] = sims.max(2)
    if mask is not None:
        best.masked_fill_(~mask.any(1), 0.0)
    return best, index


def _blocks(packed: Tensor, documents: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of documents, each with the slices of query tokens to be multiplied with it.

    Neither a block's similarities nor its vectors on either side are more than the limit.
    """
    count, longest, width = documents.shape
    limit = GPU_CELLS if packed.is_cuda else CPU_CELLS
    rows = list(_parts(len(packed), max(longest, width), limit))
    for part in _parts(count, longest * max(rows[0].stop, width), limit):
        yield part, rows


def _without_padding(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Vectors with zeros for masked ones, since 0 · NaN would be NaN in a sum of products."""
    return vectors if mask is None else vectors.masked_fill(~mask[:, :, None], 0.0)


def _parts(count: int, size: int, limit: int) -> Iterator[slice]:
    """Slices of ``count`` items of this size each, so that a slice stays within the limit."""
    step = max(1, limit // size)
    step = step // 64 * 64 or step  # whole groups of the kernel
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
    if not count:
        yield slice(0, 0)


def _rows(mask: Tensor | None, part: slice) -> Tensor | None:
    return None if mask is None else mask[part]


def _check(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None
) -> None:
    """Raise an error if shapes, dtypes or devices do not belong together."""
    for name, vectors in (("queries", queries), ("documents", documents)):
        if not isinstance(vectors, Tensor):
            raise ArgumentError(f"maxsim: {name} of {type(vectors).__name__}; expected a tensor")
        if vectors.ndim != 3:
            raise ArgumentError(
                f"maxsim: {name} of shape {list(vectors.shape)}; expected [items, tokens, width]. "
                "Add an axis to a single item: x[None]"
            )
        if vectors.dtype not in DTYPES:
            raise ArgumentError(f"maxsim: {name} of dtype {vectors.dtype}; expected floating point")
    if queries.shape[2] != documents.shape[2]:
        raise ArgumentError(
            f"maxsim: queries of {queries.shape[2]} numbers, documents of {documents.shape[2]}; "
            "both need the same width"
        )
    masks = (("query_mask", query_mask, queries), ("document_mask", document_mask, documents))
    for name, mask, vectors in masks:
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise ArgumentError(f"maxsim: {name} of {type(mask).__name__}; expected a tensor")
        if mask.shape != vectors.shape[:2] or mask.dtype != torch.bool:
            raise ArgumentError(
                f"maxsim: {name} of shape {list(mask.shape)} and dtype {mask.dtype}; expected "
                f"booleans of shape {list(vectors.shape[:2])}, True for a real vector"
            )
    tensors = [x for x in (queries, documents, query_mask, document_mask) if x is not None]
    if len({x.device for x in tensors}) > 1:
        devices = ", ".join(sorted({str(x.device) for x in tensors}))
        raise ArgumentError(f"maxsim: tensors on {devices}; move them to one device")
