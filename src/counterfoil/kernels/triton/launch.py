"""Scores by the tile kernels: one matrix product of words and regions, then one Triton kernel.

The product is in the precision that the kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterfoil.kernels.spec import SLOTS, WORDS, KernelSpec
from counterfoil.kernels.triton.packing import Indices, Packing, pack, pack_batch

MAX_BATCH_CAPTIONS = 4096
"""Most captions whose packing is cached: more are a data set, not a batch."""

WARPS = 8

BUFFER = 1 << 30
"""Bytes of similarities held at once when no gradient is needed."""


@dataclass(frozen=True)
class Words:
    """Packed words [tiles · words, D] and what the kernels read of them."""

    packing: Packing
    fragments: Tensor
    query_gram: Tensor | None = None
    spread: Tensor | None = None

    @cached_property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.fragments, dim=-1, dtype=torch.float32)


@dataclass(frozen=True)
class Regions:
    """Regions [I, R, D] and their mask (None: no padding); norms and Gram matrices on demand."""

    fragments: Tensor
    mask: Tensor | None

    @cached_property
    def gram(self) -> Tensor:
        """Inner products [I, R, R]."""
        return torch.bmm(self.fragments, self.fragments.mT)

    @cached_property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.fragments, dim=-1, dtype=torch.float32)


def tiled_words(flat: Tensor, where: Indices, lengths: list[int], spec: KernelSpec) -> Words:
    """Words of captions in tiles; ``where`` are their indices in ``flat``, caption by caption.

    Unused positions of a tile hold arbitrary words, which belong to no caption's segment.
    """
    packing, fragments = tiles_of(flat, where, lengths)
    query_gram = spread = None
    if spec.query_side == "image" and spec.method != "chamfer":
        query_gram = _query_gram(fragments, packing)
    if spec.propagation != "none":
        spread = _spread(fragments, packing, spec.gate_scale)
    return Words(packing, fragments, query_gram, spread)


def tiles_of(flat: Tensor, where: Indices, lengths: list[int]) -> tuple[Packing, Tensor]:
    """Where words stand in tiles, and the tiles [tiles · words, D]."""
    if len(lengths) <= MAX_BATCH_CAPTIONS:
        packing = pack_batch(tuple(lengths), WORDS, SLOTS)
    else:
        packing = pack(lengths, WORDS, SLOTS)
    spare = where[:1] if len(where) else np.zeros(1, dtype=np.int64)
    rows = torch.from_numpy(np.concatenate([where, spare])[packing.rows.numpy()])
    packing = replace(packing, rows=rows).to(flat.device)
    return packing, flat.index_select(0, packing.rows)


def placed(packed: Tensor, rows: Tensor) -> Tensor:
    """The words ``rows`` of packed ones; zero if ``rows`` is the number of words."""
    there = rows < len(packed)
    return packed.index_select(0, rows.clamp(max=len(packed) - 1)) * there[:, None].to(packed.dtype)


def _tiles(fragments: Tensor, packing: Packing) -> Iterator[tuple[Tensor, Tensor]]:
    """Inner products of the words of a few tiles, and a mask of those that share a caption."""
    of_tile = fragments.view(packing.tiles, packing.words, -1)
    segments = packing.segments.view(packing.tiles, packing.words)
    for tiles, seg in zip(of_tile.split(512), segments.split(512), strict=True):
        same = (seg[:, :, None] == seg[:, None, :]) & (seg < packing.slots)[:, :, None]
        yield tiles @ tiles.transpose(1, 2), same


def _query_gram(fragments: Tensor, packing: Packing) -> Tensor:
    return torch.cat(
        [query_gram.masked_fill(~same, 0.0) for query_gram, same in _tiles(fragments, packing)]
    )


def _spread(fragments: Tensor, packing: Packing, scale: float) -> Tensor:
    """Weights of NAAF's eq. 9, [tiles, from, to]: how much of a word's match each word gets."""
    parts = []
    for query_gram, same in _tiles(fragments, packing):
        logits = (scale * query_gram.float()).masked_fill(~same, -torch.inf)
        parts.append(logits.softmax(-1).nan_to_num(0.0).transpose(1, 2).to(fragments.dtype))
    return torch.cat(parts).contiguous()


def fused_scores(spec: KernelSpec, words: Words, regions: Regions) -> Tensor:
    """Scores [I, captions] in single precision, without gradients."""
    packing = words.packing
    images, per_image, _ = regions.fragments.shape
    slots = packing.tiles * packing.slots
    scores = words.fragments.new_zeros(images, len(packing.places), dtype=torch.float32)
    flat = regions.fragments.flatten(0, 1)
    width = len(words.fragments)
    exact = spec.method == "naaf" and flat.element_size() < 4 and widens(flat.device)
    dtype = torch.float32 if exact else flat.dtype
    rows = max(1, min(images, BUFFER // (dtype.itemsize * max(1, per_image * width))))
    if packing.tiles and images:
        buffer = flat.new_empty(rows * per_image, width, dtype=dtype)
        out = scores.new_zeros(rows, slots + 1)  # the last slot is for captions without words
        for top in range(0, images, rows):
            block = slice(top, min(top + rows, images))
            part = flat[block.start * per_image : block.stop * per_image]
            sims = product(part, words.fragments, buffer[: len(part)])
            by_slot = out[: block.stop - block.start]
            launch(spec, sims, words, regions, block, by_slot, rows)
            scores[block] = in_order(by_slot, packing, spec)
    return scores


def in_order(out: Tensor, packing: Packing, spec: KernelSpec) -> Tensor:
    """Scores by slot as scores by caption."""
    scores = out.index_select(1, packing.places)
    return scores if spec.factor == 1.0 else scores * spec.factor


def launch(
    spec: KernelSpec,
    sims: Tensor,
    words: Words,
    regions: Regions,
    block: slice,
    out: Tensor,
    rows: int,
) -> None:
    """Run a kernel over the similarities of a block of images with all words, into ``out``.

    A job's blocks have ``rows`` images, the last one fewer: all run in the same kernel.
    """
    from counterfoil.kernels.triton import tile_kernels as kernels

    packing = words.packing
    images, per_image = block.stop - block.start, regions.fragments.shape[1]
    masked = regions.mask is not None
    mask = regions.mask[block].contiguous().view(torch.uint8) if masked else sims  # type: ignore[index]
    common: dict[str, Any] = {
        "key_mask": mask,
        "segments": packing.segments,
        "counts": packing.counts,
        "out": out,
        "images": images,
        "regions": per_image,
        "width": sims.stride(0),
        "slots_total": out.stride(0),
        "scale": spec.scale,
        "lse_scale": spec.lse_scale,
        "METHOD": spec.method,
        "HOW": spec.pooling,
        "ACTIVATION": spec.activation,
        "PROB": spec.prob,
        "MASKED": masked,
        "PRECISION": precision(words.fragments.dtype),
        "BW": packing.words,
        "BC": packing.slots,
        "BR": block_of(per_image),
        "num_warps": WARPS,
    }

    def run(per_program: int) -> None:
        grid = (packing.tiles, -(-images // per_program))
        if spec.query_side == "image" or spec.method == "chamfer":
            query_gram = words.query_gram if words.query_gram is not None else sims
            kernels.image_queries[grid](
                sims, query_gram, regions.norms[block], PER=per_program, **common
            )
            return
        spread = words.spread if words.spread is not None else sims
        by_gram = spec.method != "chan"
        kernels.text_queries[grid](
            sims,
            regions.gram[block] if by_gram else sims,
            words.norms if by_gram else sims,
            spread,
            boundary=spec.boundary,
            PROPAGATION=spec.propagation if words.spread is not None else "none",
            NEGATIVE=spec.negative,
            UNIT=spec.unit_words,
            PER=per_program,
            **common,
        )

    run_fitting(run, images_per_program(packing.tiles, rows))


def run_fitting(run: Callable[[int], None], per_program: int) -> None:
    """Launch with ``per_program`` items per program, or with one if the loop does not fit.

    A loop stores the values that its iterations share in shared memory: in single precision more
    than most GPUs have. Without a loop, a few dozen kilobytes are enough.
    """
    from triton.runtime.errors import OutOfResources

    try:
        run(per_program)
    except OutOfResources:
        if per_program == 1:
            raise
        run(1)


def images_per_program(tiles: int, images: int) -> int:
    """A power of two that leaves about two thousand programs for the device to schedule."""
    return min(64, 1 << max(0, (tiles * images // 2048).bit_length() - 1))


def precision(dtype: torch.dtype) -> str:
    """The tensor cores' mode for single precision: as precise as the fragments."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def block_of(regions: int) -> int:
    """Smallest power of two, at least 16, that holds the regions."""
    return max(16, 1 << (regions - 1).bit_length())


def product(v: Tensor, u: Tensor, out: Tensor) -> Tensor:
    """Similarities of regions and words, in the precision of ``out``."""
    if out.dtype == v.dtype:
        return torch.mm(v, u.T, out=out)
    if v.is_cuda:
        sims: Tensor = torch.ops.aten.mm.dtype_out(v, u.T, out.dtype, out=out)
        return sims
    return torch.mm(v.to(out.dtype), u.T.to(out.dtype), out=out)


def widens(device: torch.device) -> bool:
    """Whether a device multiplies half precision into single, which NAAF needs twice.

    At the boundary, a rounded similarity decides whether a word counts. The relevance weights
    divide by values near zero. A shift of half-precision values could serve only one of the two.
    """
    if device.type != "cuda":
        return True
    return _widens(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _widens(index: int) -> bool:
    ones = torch.ones(16, 16, dtype=torch.float16, device=torch.device("cuda", index))
    out = torch.zeros(16, 16, dtype=torch.float32, device=ones.device)
    try:
        torch.ops.aten.mm.dtype_out(ones, ones, torch.float32, out=out)
    except (AttributeError, NotImplementedError, RuntimeError):  # PyTorch before 2.8
        return False
    return bool((out == 16).all())
