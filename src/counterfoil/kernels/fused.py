"""Scores by fused kernels: one matrix product of words and regions, then one Triton kernel.

A matcher says what it computes as a `Recipe`; what has no recipe is scored by PyTorch. Captions
with more words than a tile holds, and captions without words, are left to PyTorch, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from counterfoil.kernels.packing import Indices, Packing, pack, pack_batch
from counterfoil.kernels.products import product, widens

WORDS, SLOTS = 128, 16
"""Words and captions of a tile."""

BATCH = 4096
"""Captions that are a batch, and not a data set."""

WARPS = 8

OLDEST = (8, 0)
"""Compute capability with the tensor cores that the kernels are made for."""

BUFFER = 1 << 30
"""Bytes of similarities held at once where no gradient is wanted."""

SHARPEST = 40.0
"""Largest softmax scale: beyond, e^scale squared does not fit single precision."""

LARGEST_REGIONS = 128
"""More do not fit a tile."""


@dataclass(frozen=True)
class Recipe:
    """What a kernel computes: who asks, how weights are made, how fragments become one score."""

    method: Literal["scan", "bfan", "chan", "naaf", "chamfer"]
    asking: Literal["words", "regions"] = "words"
    scale: float = 1.0
    pooling: Literal["lse", "mean", "max", "sum", "softmax"] = "mean"
    sharpness: float = 1.0
    raised: Literal["leaky", "relu", "none"] = "leaky"
    prob: bool = False
    boundary: float = 0.0
    negative: bool = True
    gate: Literal["none", "spread", "gate"] = "none"
    gate_scale: float = 0.0
    unit_words: bool = False
    factor: float = 1.0

    @property
    def possible(self) -> bool:
        return self.scale <= SHARPEST or self.method == "chan"


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def obstacle(index: int) -> str | None:
    """Why the kernels cannot run on a CUDA device, in words; None where they can."""
    if not has_triton():
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        needed, found = (".".join(map(str, number)) for number in (OLDEST, capability))
        return f"they need a GPU of compute capability {needed}, this one has {found}"
    return fault(torch.device("cuda", index))


def fault(device: torch.device) -> str | None:
    """What keeps Triton from working: it compiles with a C compiler and Python's headers."""
    mark = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        from counterfoil.kernels.triton_scores import write_one

        with torch.cuda.device_of(mark):
            write_one[(1,)](mark)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"Triton does not work here ({first}); it needs a C compiler and the headers of Python"
        )
    return None if mark.item() else "Triton's programs do nothing here"


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind can be scored by the kernels."""
    if device.type != "cuda" or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return obstacle(_index(device)) is None


def without_kernels(device: torch.device) -> str | None:
    """A line for people where PyTorch scores what kernels could; None where they do."""
    if device.type != "cuda":
        return f"scoring by PyTorch on the {device.type.upper()}"
    why = obstacle(_index(device))
    return why and f"scoring by PyTorch, which is slower than the fused kernels: {why}"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@dataclass(frozen=True)
class Words:
    """Packed words [tiles · words, D] and what the kernels read of them."""

    packing: Packing
    fragments: Tensor
    kin: Tensor | None = None
    spread: Tensor | None = None

    @cached_property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.fragments, dim=-1, dtype=torch.float32)


@dataclass(frozen=True)
class Regions:
    """Regions [I, R, D] and their mask; None: all are real. What no kernel asks is not computed."""

    fragments: Tensor
    mask: Tensor | None

    @cached_property
    def gram(self) -> Tensor:
        """Inner products [I, R, R]."""
        return torch.bmm(self.fragments, self.fragments.mT)

    @cached_property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.fragments, dim=-1, dtype=torch.float32)


def tiled_words(flat: Tensor, where: Indices, lengths: list[int], recipe: Recipe) -> Words:
    """Words of captions in tiles; they stand at ``where`` in ``flat``, caption after caption.

    Where a tile has a place to spare, any word may stand: it is in no caption's segment.
    """
    packing, fragments = tiles_of(flat, where, lengths)
    kin = spread = None
    if recipe.asking == "regions" and recipe.method != "chamfer":
        kin = _kin(fragments, packing)
    if recipe.gate != "none":
        spread = _spread(fragments, packing, recipe.gate_scale)
    return Words(packing, fragments, kin, spread)


def tiles_of(flat: Tensor, where: Indices, lengths: list[int]) -> tuple[Packing, Tensor]:
    """Where words stand in tiles, and the tiles [tiles · words, D]."""
    if len(lengths) <= BATCH:
        packing = pack_batch(tuple(lengths), WORDS, SLOTS)
    else:
        packing = pack(lengths, WORDS, SLOTS)
    spare = where[:1] if len(where) else np.zeros(1, dtype=np.int64)
    rows = torch.from_numpy(np.concatenate([where, spare])[packing.rows.numpy()])
    packing = replace(packing, rows=rows).to(flat.device)
    return packing, flat.index_select(0, packing.rows)


def placed(packed: Tensor, rows: Tensor) -> Tensor:
    """Words at their places; zero where none stands, which is where ``rows`` is their number."""
    there = rows < len(packed)
    return packed.index_select(0, rows.clamp(max=len(packed) - 1)) * there[:, None].to(packed.dtype)


def _tiles(fragments: Tensor, packing: Packing) -> Iterator[tuple[Tensor, Tensor]]:
    """Inner products of the words of some tiles, and which of them share a caption."""
    of_tile = fragments.view(packing.tiles, packing.words, -1)
    segments = packing.segments.view(packing.tiles, packing.words)
    for some, seg in zip(of_tile.split(512), segments.split(512), strict=True):
        same = (seg[:, :, None] == seg[:, None, :]) & (seg < packing.slots)[:, :, None]
        yield some @ some.transpose(1, 2), same


def _kin(fragments: Tensor, packing: Packing) -> Tensor:
    return torch.cat([kin.masked_fill(~same, 0.0) for kin, same in _tiles(fragments, packing)])


def _spread(fragments: Tensor, packing: Packing, scale: float) -> Tensor:
    """NAAF's eq. 9, [tiles, from, to]: how much of a word's match reaches each word like it."""
    parts = []
    for kin, same in _tiles(fragments, packing):
        logits = (scale * kin.float()).masked_fill(~same, -torch.inf)
        parts.append(logits.softmax(-1).nan_to_num(0.0).transpose(1, 2).to(fragments.dtype))
    return torch.cat(parts).contiguous()


def fused_scores(recipe: Recipe, words: Words, regions: Regions) -> Tensor:
    """Scores [I, captions] in single precision, without gradients."""
    packing = words.packing
    images, per_image, _ = regions.fragments.shape
    slots = packing.tiles * packing.slots
    scores = words.fragments.new_zeros(images, len(packing.places), dtype=torch.float32)
    flat = regions.fragments.flatten(0, 1)
    width = len(words.fragments)
    exact = recipe.method == "naaf" and flat.element_size() < 4 and widens(flat.device)
    kept = torch.float32 if exact else flat.dtype
    rows = max(1, min(images, BUFFER // (kept.itemsize * max(1, per_image * width))))
    if packing.tiles and images:
        buffer = flat.new_empty(rows * per_image, width, dtype=kept)
        out = scores.new_zeros(rows, slots + 1)  # the last one is of captions without words
        for top in range(0, images, rows):
            some = slice(top, min(top + rows, images))
            part = flat[some.start * per_image : some.stop * per_image]
            sims = product(part, words.fragments, buffer[: len(part)])
            found = out[: some.stop - some.start]
            launch(recipe, sims, words, regions, some, found)
            scores[some] = in_order(found, packing, recipe)
    return scores


def in_order(out: Tensor, packing: Packing, recipe: Recipe) -> Tensor:
    """Scores by slot as scores by caption."""
    scores = out.index_select(1, packing.places)
    return scores if recipe.factor == 1.0 else scores * recipe.factor


def launch(
    recipe: Recipe, sims: Tensor, words: Words, regions: Regions, some: slice, out: Tensor
) -> None:
    """Run a kernel over the similarities of some images with all words, into their rows."""
    from counterfoil.kernels import triton_scores as kernels

    packing = words.packing
    images, per_image = some.stop - some.start, regions.fragments.shape[1]
    masked = regions.mask is not None
    mask = regions.mask[some].contiguous().view(torch.uint8) if masked else sims  # type: ignore[index]
    common: dict[str, Any] = {
        "answers": mask,
        "segments": packing.segments,
        "counts": packing.counts,
        "out": out,
        "images": images,
        "regions": per_image,
        "width": sims.stride(0),
        "slots_total": out.stride(0),
        "scale": recipe.scale,
        "sharpness": recipe.sharpness,
        "METHOD": recipe.method,
        "HOW": recipe.pooling,
        "RAISE": recipe.raised,
        "PROB": recipe.prob,
        "MASKED": masked,
        "PRECISION": precision(words.fragments.dtype),
        "BW": packing.words,
        "BC": packing.slots,
        "BR": block_of(per_image),
        "num_warps": WARPS,
    }

    def run(per_program: int) -> None:
        grid = (packing.tiles, -(-images // per_program))
        if recipe.asking == "regions" or recipe.method == "chamfer":
            kin = words.kin if words.kin is not None else sims
            kernels.asked_by_regions[grid](
                sims, kin, regions.norms[some], PER=per_program, **common
            )
            return
        spread = words.spread if words.spread is not None else sims
        by_gram = recipe.method != "chan"
        kernels.asked_by_words[grid](
            sims,
            regions.gram[some] if by_gram else sims,
            words.norms if by_gram else sims,
            spread,
            boundary=recipe.boundary,
            GATE=recipe.gate if words.spread is not None else "none",
            NEGATIVE=recipe.negative,
            UNIT=recipe.unit_words,
            PER=per_program,
            **common,
        )

    run_fitting(run, images_per_program(packing.tiles, images))


def run_fitting(run: Callable[[int], None], per_program: int) -> None:
    """Launch with so much for each program, or with one where what a loop keeps does not fit.

    A loop holds what its turns share in a multiprocessor's own memory: in single precision more
    than most GPUs have. Without a loop a few dozen kilobytes do.
    """
    from triton.runtime.errors import OutOfResources

    try:
        run(per_program)
    except OutOfResources:
        if per_program == 1:
            raise
        run(1)


def images_per_program(tiles: int, images: int) -> int:
    """A power of two that leaves about two thousand programs for the device to share out."""
    return min(64, 1 << max(0, (tiles * images // 2048).bit_length() - 1))


def precision(dtype: torch.dtype) -> str:
    """How tensor cores multiply single precision: as exactly as the fragments are known."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def block_of(regions: int) -> int:
    """Smallest power of two, at least 16, that holds the regions."""
    return max(16, 1 << (regions - 1).bit_length())
