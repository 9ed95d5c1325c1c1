"""Launch of the MaxSim kernel: block sizes by width and precision, without autotuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.triton.launch import block_of, precision

MAX_GRID = (1 << 16) - 1
"""Limit of a grid's second dimension."""

MAX_OFFSET = (1 << 31) - 1
"""Numbers of a group of documents: offsets within it have 32 bits."""


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a launch.

    ``tokens`` query tokens; ``documents`` × ``steps``: columns of one product; ``width`` numbers of
    a vector at a time; ``turns`` groups of documents per program. With ``registers`` as the limit
    per thread, two programs share a multiprocessor, and one multiplies while the other compares.
    """

    tokens: int
    documents: int
    steps: int
    width: int
    turns: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def columns(self) -> int:
        return self.documents * self.steps


def candidates(width: int, dtype: torch.dtype, tokens: int) -> Iterator[Blocks]:
    """Block sizes, the preferred ones first; the later ones are for GPUs with less memory.

    For vectors of at most 128 numbers in half precision, the query vectors stay on the chip. Wider
    ones are multiplied 64 numbers at a time, with more columns per product.
    """
    whole = block_of(width)
    few = tokens <= 64
    if dtype == torch.float32:
        yield Blocks(64, 16, 4, 32, 1, 4, 2)
        return
    if whole <= 128:
        if few:
            yield Blocks(64, 32, 4, whole, 4, 4, 2)
        else:
            yield Blocks(128, 32, 4, whole, 4, 8, 2, registers=128)
    elif few:
        yield Blocks(64, 32, 4, 64, 1, 4, 3)
    else:
        yield Blocks(128, 64, 4, 64, 1, 8, 3)
    yield Blocks(64, 16, 4, min(64, whole), 1, 4, 2)


def fits(longest: int, width: int) -> bool:
    """Whether the offsets within a group of documents have 32 bits."""
    return 64 * longest * width <= MAX_OFFSET


def fused_maxima(
    packed: Tensor, documents: Tensor, mask: Tensor | None, with_index: bool
) -> tuple[Tensor, Tensor | None]:
    """Largest products [tokens, documents] in single precision, and their positions if asked for.

    ``packed`` [tokens, D] and ``documents`` [m, length, D] are contiguous and of one dtype.
    Raises OutOfResources if no block sizes fit the GPU.
    """
    from triton.runtime.errors import OutOfResources

    count, longest, width = documents.shape
    best = packed.new_empty(len(packed), count, dtype=torch.float32)
    index_dtype = torch.int16 if longest <= torch.iinfo(torch.int16).max else torch.int32
    index = best.new_empty(best.shape, dtype=index_dtype) if with_index else None
    options = list(candidates(width, packed.dtype, len(packed)))
    for number, blocks in enumerate(options, 1):
        try:
            _launch(packed, documents, mask, best, index, blocks)
            break
        except OutOfResources:
            if number == len(options):
                raise
    return best, index


def _launch(
    packed: Tensor,
    documents: Tensor,
    mask: Tensor | None,
    best: Tensor,
    index: Tensor | None,
    blocks: Blocks,
) -> None:
    from counterfoil.kernels.triton.maxsim_kernel import largest_products

    count, longest, width = documents.shape
    groups = -(-count // blocks.documents)
    turns = max(blocks.turns if groups >= 64 else 1, -(-groups // MAX_GRID))
    options: dict[str, Any] = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    if blocks.registers is not None:
        options["maxnreg"] = blocks.registers
    largest_products[(-(-len(packed) // blocks.tokens), -(-groups // turns))](
        packed, documents, documents if mask is None else mask.view(torch.uint8),
        _group_lengths(documents, mask, groups, blocks.documents), best,
        best if index is None else index,
        len(packed), count, longest, width,
        MASKED=mask is not None, RAGGED=longest % blocks.steps != 0, INDEX=index is not None,
        RESIDENT=blocks.width >= width, EVEN=width % blocks.width == 0,
        PRECISION=precision(packed.dtype),
        BM=blocks.tokens, BG=blocks.documents, BJ=blocks.steps, BD=blocks.width, PER=turns,
        **options,
    )  # fmt: skip


def _group_lengths(documents: Tensor, mask: Tensor | None, groups: int, size: int) -> Tensor:
    """Number of positions up to the last real token in each group of documents."""
    count, longest, _ = documents.shape
    if mask is None:
        return torch.full((groups,), longest, dtype=torch.int32, device=documents.device)
    ends = (mask * torch.arange(1, longest + 1, device=mask.device)).amax(1)
    padded = torch.nn.functional.pad(ends, (0, groups * size - count))
    return padded.view(groups, size).amax(1).to(torch.int32)
