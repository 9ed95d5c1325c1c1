"""MaxSim: late interaction of two sets of vectors, as in ColBERT and ColPali.

The score of a query with a document is Σ over the query's vectors of the largest inner product with
a vector of the document. Similarities are never stored: the largest product of each query vector
with each document is computed by a fused kernel (`triton.maxsim`) or block by block in PyTorch. The
backward pass knows each maximum's position, and gives its gradient to that one pair of vectors.

Shapes: n queries of q tokens, m documents of k tokens, D width; W real tokens of all queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from counterfoil.core.errors import ArgumentError
from counterfoil.kernels.spec import usable

CPU_CELLS, GPU_CELLS = 1 << 22, 1 << 27
"""Similarities of a block in PyTorch, and cells of the one-hot gradient in the backward pass."""

BUFFER = 1 << 30
"""Bytes of maxima held at once by the fused path."""

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

    Scores are in single precision, for double precision in double. With gradients to both sides; of
    equal maxima, the first one gets the gradient. On a GPU (compute capability 8.0 or later, with
    Triton) one kernel multiplies and compares; elsewhere, PyTorch does it in blocks.

    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[0.5, 0.1], [0.2, 0.3]], [[1.0, 0.0], [9.0, 9.0]]])
    >>> maxsim(queries, documents, document_mask=torch.tensor([[True, True], [True, False]]))
    tensor([[0.8000, 1.0000]])
    """
    _check(queries, documents, query_mask, document_mask)
    dtype = _product_dtype(queries, documents)
    tokens = _Tokens.of(queries, query_mask)
    packed = queries.flatten(0, 1).to(dtype)
    if tokens.rows is not None:
        packed = packed.index_select(0, tokens.rows)
    documents = documents.to(dtype)
    with torch.autocast(queries.device.type, enabled=False):
        if torch.is_grad_enabled() and (packed.requires_grad or documents.requires_grad):
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

    def repeated(self, values: Tensor, tokens: int) -> Tensor:
        """Values [n, …] of queries for each of their tokens [W, …]."""
        return values.repeat_interleave(self.lengths, dim=0, output_size=tokens)


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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        packed, documents, index, mask = ctx.saved_tensors
        count, longest, width = documents.shape
        if mask is not None:
            grad = grad * mask.any(1)  # a document without tokens scores 0, whatever is stored
        grad = ctx.tokens.repeated(grad.to(packed.dtype), len(packed))  # [W, m]
        wide = torch.promote_types(packed.dtype, torch.float32)
        d_packed = torch.zeros_like(packed, dtype=wide)
        d_documents = torch.zeros_like(documents)
        if not index.numel() or not longest:
            return d_packed.to(packed.dtype), d_documents, None, None
        cells = GPU_CELLS if packed.is_cuda else CPU_CELLS
        for part in _parts(count, len(packed) * longest, cells):
            # a one-hot factor for each maximum: the sums over pairs are then two matrix products,
            # which are faster than adding vectors one by one, and in a fixed order
            d_sims = grad.new_zeros(len(packed), part.stop - part.start, longest)
            d_sims.scatter_(2, index[:, part, None].long(), grad[:, part, None])
            d_sims = d_sims.flatten(1)
            d_packed += d_sims @ documents[part].flatten(0, 1)
            d_documents[part] = (d_sims.T @ packed).view(-1, longest, width)
        return d_packed.to(packed.dtype), d_documents, None, None


def _scores(
    packed: Tensor, documents: Tensor, tokens: _Tokens, mask: Tensor | None, with_index: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores [n, m] and, ``with_index``, the positions of maxima [W, m]."""
    packed, documents = packed.contiguous(), documents.contiguous()
    mask = mask.contiguous() if mask is not None else None
    scores, indices = [], []
    for part in _parts(len(documents), 4 * max(1, len(packed)), BUFFER):
        best, index = _maxima(packed, documents[part], _rows(mask, part), with_index)
        scores.append(tokens.total(best))
        if index is not None:
            indices.append(index)
    if len(scores) == 1:
        return scores[0], indices[0] if with_index else None
    return torch.cat(scores, 1), torch.cat(indices, 1) if with_index else None


def _maxima(
    packed: Tensor, documents: Tensor, mask: Tensor | None, with_index: bool
) -> tuple[Tensor, Tensor | None]:
    """Largest products [W, m] and, ``with_index``, their positions; by the fused kernel if any."""
    if packed.numel() and documents.numel() and usable(packed.device, packed.dtype):
        from triton.runtime.errors import OutOfResources

        from counterfoil.kernels.triton.maxsim import fits, fused_maxima

        if fits(*documents.shape[1:]):
            try:
                with torch.cuda.device_of(packed):
                    return fused_maxima(packed, documents, mask, with_index)
            except OutOfResources:  # the GPU is too small for the kernel
                pass
    return torch_maxima(packed, documents, mask)


def torch_maxima(packed: Tensor, documents: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Largest products [W, m] and their positions in PyTorch, a few documents at a time."""
    count, longest, _ = documents.shape
    wide = torch.promote_types(packed.dtype, torch.float32)
    best = packed.new_zeros(len(packed), count, dtype=wide)
    index = torch.zeros(best.shape, dtype=torch.long, device=packed.device)
    if not best.numel() or not longest:
        return best, index
    cells = GPU_CELLS if packed.is_cuda else CPU_CELLS
    for part in _parts(count, len(packed) * longest, cells):
        keys = documents[part].flatten(0, 1)
        sims = (packed @ keys.T).view(len(packed), -1, longest)
        real = _rows(mask, part)
        if real is not None:
            sims = sims.masked_fill(~real, -torch.inf)
        values, index[:, part] = sims.max(2)
        best[:, part] = values
    if mask is not None:
        best.masked_fill_(~mask.any(1), 0.0)
    return best, index


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


def _product_dtype(queries: Tensor, documents: Tensor) -> torch.dtype:
    """The wider precision of both; that of mixed precision if it is on."""
    wide = torch.promote_types(queries.dtype, documents.dtype)
    device = queries.device.type
    if wide == torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wide


def _check(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None
) -> None:
    """Raise an error if shapes, dtypes or devices do not belong together."""
    for name, vectors in (("queries", queries), ("documents", documents)):
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
        if mask.shape != vectors.shape[:2] or mask.dtype != torch.bool:
            raise ArgumentError(
                f"maxsim: {name} of shape {list(mask.shape)} and dtype {mask.dtype}; expected "
                f"booleans of shape {list(vectors.shape[:2])}, True for a real vector"
            )
    tensors = [x for x in (queries, documents, query_mask, document_mask) if x is not None]
    if len({x.device for x in tensors}) > 1:
        devices = ", ".join(sorted({str(x.device) for x in tensors}))
        raise ArgumentError(f"maxsim: tensors on {devices}; move them to one device")
