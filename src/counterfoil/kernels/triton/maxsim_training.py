"""MaxSim with gradients in three launches, for batches whose time is mostly the host's.

Each of the PyTorch operations that pack the tokens of large jobs, mark NaN, and fill the one-hot
factor takes the host longer than a batch takes the GPU. Here, kernels read padding and masks; the
host only allocates the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.first_order import first_order_only
from counterfoil.kernels.triton.launch import block_of, precision

MAX_CELLS = 1 << 22
"""Most positions of maxima (query tokens · documents), padding included.

Beyond, the GPU takes longer than the host, and packed tokens save more than launches cost: at twice
as many, both ways took the same time on an H200.
"""

MAX_OFFSET = (1 << 31) - 1
"""Numbers of a tensor: offsets have 32 bits."""

MANY_TOKENS = 1 << 13
"""Query tokens from which larger blocks still occupy the GPU."""


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a launch: query tokens; documents × steps of a product; width at a time.

    ``registers`` is a limit per thread, with which two programs share a multiprocessor.
    """

    tokens: int
    documents: int
    steps: int
    width: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """Triton's own options of a launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


def fits(queries: Tensor, documents: Tensor) -> bool:
    """Whether a batch is small enough for this path, and not empty."""
    tokens = queries.shape[0] * queries.shape[1]
    return (
        0 < tokens * documents.shape[0] <= MAX_CELLS
        and 0 < documents.numel() <= MAX_OFFSET
        and 0 < queries.numel() <= MAX_OFFSET
    )


def scores_with_gradient(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None
) -> Tensor:
    """Scores [n, m] of a batch that `fits`; both sides are of one dtype.

    Raises OutOfResources if no block sizes fit the GPU.
    """
    sides = queries.contiguous(), documents.contiguous()
    scores: Tensor = _MaxSim.apply(*sides, query_mask, document_mask)
    return scores


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        query_mask: Tensor | None,
        document_mask: Tensor | None,
    ) -> Tensor:
        query_bytes, document_bytes = _bytes(query_mask), _bytes(document_mask)
        scores, positions = _forward(queries, documents, query_bytes, document_bytes)
        ctx.save_for_backward(queries, documents, query_bytes, document_bytes, positions)
        return scores

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        queries, documents, query_mask, document_mask, positions = ctx.saved_tensors
        of_queries, of_documents = ctx.needs_input_grad[:2]
        sides, grad = (queries, documents), grad.contiguous()
        d_queries = d_documents = None
        with torch.cuda.device_of(queries):
            if of_queries:
                d_queries = _query_gradients(*sides, document_mask, grad, positions)
            if of_documents:
                d_documents = _document_gradients(*sides, query_mask, grad, positions)
        return d_queries, d_documents, None, None


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _forward(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    from counterfoil.kernels.triton.maxsim_training_kernels import scores_and_positions

    (n, q, width), (m, k, _) = queries.shape, documents.shape
    scores = queries.new_empty(n, m, dtype=torch.float32)
    small = k <= torch.iinfo(torch.int16).max
    positions = queries.new_empty(n * q, m, dtype=torch.int16 if small else torch.int32)

    def run(blocks: Blocks) -> None:
        per_query = min(blocks.tokens, block_of(q))
        groups = -(-m // blocks.documents)
        grid = (-(-n // (blocks.tokens // per_query)) * groups,)
        scores_and_positions[grid](
            queries, documents, queries if query_mask is None else query_mask,
            documents if document_mask is None else document_mask, scores, positions,
            n, q, m, k, width,
            QUERY_MASKED=query_mask is not None, DOCUMENT_MASKED=document_mask is not None,
            RAGGED=k % blocks.steps != 0, RESIDENT=blocks.width >= width,
            EVEN=width % blocks.width == 0, PRECISION=precision(queries.dtype),
            BM=blocks.tokens, BT=per_query, BG=blocks.documents, BJ=blocks.steps, BD=blocks.width,
            **blocks.options(),
        )  # fmt: skip

    with torch.cuda.device_of(queries):
        _first_that_fits(run, _forward_blocks(queries))
    return scores, positions


def _query_gradients(
    queries: Tensor, documents: Tensor, mask: Tensor | None, upstream: Tensor, positions: Tensor
) -> Tensor:
    from counterfoil.kernels.triton.maxsim_training_kernels import query_gradients

    gradients = torch.empty_like(queries)

    def run(blocks: Blocks) -> None:
        grid = (-(-len(positions) // blocks.tokens) * -(-queries.shape[2] // blocks.width),)
        _run_backward(
            query_gradients, grid, documents, mask, upstream, positions, gradients,
            queries.shape[1], documents.shape, blocks,
        )  # fmt: skip

    _first_that_fits(run, _backward_blocks(queries))
    return gradients


def _document_gradients(
    queries: Tensor, documents: Tensor, mask: Tensor | None, upstream: Tensor, positions: Tensor
) -> Tensor:
    from counterfoil.kernels.triton.maxsim_training_kernels import document_gradients

    gradients = torch.empty_like(documents)
    m, k, width = documents.shape

    def run(blocks: Blocks) -> None:
        parts = -(-width // blocks.width) * -(-k // blocks.steps)
        _run_backward(
            document_gradients, (-(-m // blocks.documents) * parts,), queries, mask, upstream,
            positions, gradients, queries.shape[1], documents.shape, blocks,
        )  # fmt: skip

    _first_that_fits(run, _backward_blocks(queries))
    return gradients


def _run_backward(
    kernel: Any,
    grid: tuple[int],
    vectors: Tensor,
    mask: Tensor | None,
    upstream: Tensor,
    positions: Tensor,
    gradients: Tensor,
    q: int,
    documents: torch.Size,
    blocks: Blocks,
) -> None:
    """Launch the kernel that multiplies the one-hot factor with ``vectors``."""
    m, k, width = documents
    kernel[grid](
        vectors, vectors if mask is None else mask, upstream, positions, gradients,
        len(positions), q, m, k, width,
        MASKED=mask is not None, EVEN=width % blocks.width == 0,
        PRECISION=precision(vectors.dtype),
        BM=blocks.tokens, BG=blocks.documents, BJ=blocks.steps, BD=blocks.width,
        **blocks.options(),
    )  # fmt: skip


def _forward_blocks(queries: Tensor) -> tuple[Blocks, ...]:
    """Block sizes, the preferred ones first; the later ones are for GPUs with less memory."""
    n, q, width = queries.shape
    whole = block_of(width)
    if queries.dtype == torch.float32:
        return (Blocks(64, 16, 4, 32, 4, 2),)
    small = Blocks(64, 16, 4, min(64, whole), 4, 2)
    if n * q <= 64:
        return Blocks(64, 32, 4, whole if whole <= 128 else 64, 4, 2), small
    if whole <= 128:
        return Blocks(128, 32, 4, whole, 8, 2), small
    return Blocks(128, 32, 4, 64, 8, 3), small


def _backward_blocks(queries: Tensor) -> tuple[Blocks, ...]:
    n, q, width = queries.shape
    whole = block_of(width)
    if queries.dtype == torch.float32:
        return (Blocks(64, 16, 4, min(64, whole), 4, 2),)
    small = Blocks(64, 16, 4, min(128, whole), 4, 2)
    if n * q < MANY_TOKENS:
        return (small,)
    return Blocks(128, 32, 4, min(128, whole), 8, 2), small


def _first_that_fits(run: Callable[[Blocks], None], options: tuple[Blocks, ...]) -> None:
    from triton.runtime.errors import OutOfResources

    for number, blocks in enumerate(options, 1):
        try:
            run(blocks)
            break
        except OutOfResources:
            if number == len(options):
                raise
