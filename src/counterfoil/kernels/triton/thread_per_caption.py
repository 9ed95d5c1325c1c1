"""Scores by `thread_per_caption_kernels`, for large jobs with at most a few dozen regions.

A kernel takes several seconds to compile, per method and number of regions, so small jobs use the
tile kernels (`launch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.kernels.spec import ENTRIES_PER_LOAD, KernelSpec
from counterfoil.kernels.triton.compilation import compile_together
from counterfoil.kernels.triton.launch import BUFFER, Regions, placed, product, widens
from counterfoil.kernels.triton.packing import InterleavedCaptions, interleave

WIDTH = 128
"""Captions per group: one for each thread of a program."""

MAX_IMAGES_PER_LAUNCH = (1 << 16) - 1
"""Limit of a grid's second dimension."""

WORDS_STEP, MAX_IMAGE_QUERY_WORDS, MOST_REGIONS = 4, 24, 40
"""Image queries: kernels for 4, 8 … 24 words. More regions, or words, take too long to compile and
too many registers."""

REGISTERS, FROM_REGIONS = 168, 25
"""Register limit per thread for text queries of SCAN and BFAN, and from how many regions on: three
programs then share a multiprocessor instead of two. NAAF, and masks, need more registers."""


@dataclass(frozen=True)
class InterleavedWords:
    """Interleaved words, with their norms and Gram matrices."""

    captions: InterleavedCaptions
    fragments: Tensor
    norms: Tensor
    query_gram: Tensor | None
    query_gram_at: Tensor


def suits(spec: KernelSpec, length: int, regions: int) -> bool:
    """Whether the kernels support captions of this length."""
    if regions > MOST_REGIONS or not spec.possible:
        return False
    return spec.query_side == "text" or length <= MAX_IMAGE_QUERY_WORDS


def share_product(specs: Sequence[KernelSpec]) -> bool:
    """Whether specs read the same similarities, in one order of words: both directions of BFAN.

    NAAF's are in another precision, and only one spec can have Gram matrices of words.
    """
    by_regions = [spec for spec in specs if spec.query_side == "image"]
    return len(by_regions) <= 1 and all(spec.method in ("scan", "bfan") for spec in specs)


def interleaved_words(
    packed: Tensor, lengths: list[int], specs: Sequence[KernelSpec]
) -> InterleavedWords:
    """Interleaved words of captions that are packed one after the other, for specs that share."""
    by_regions = any(spec.query_side == "image" for spec in specs)
    spec = specs[0]
    captions = interleave(lengths, WIDTH, WORDS_STEP if by_regions else 1).to(packed.device)
    fragments = placed(packed, captions.rows)
    norms = fragments.float().norm(dim=-1)
    query_gram, sizes = None, [0] * captions.groups
    if by_regions or spec.propagation != "none":
        parts = []
        for group, grams in enumerate(_grams(fragments, captions)):
            if by_regions:
                fours = _triangle(grams).unflatten(1, (-1, ENTRIES_PER_LOAD))
                parts.append(part := fours.transpose(0, 1))
            else:
                part = _spread(grams, captions, group, spec)
                parts.append(part.permute(1, 2, 0))
            sizes[group] = part.numel()
        query_gram = torch.cat([part.flatten() for part in parts]).to(packed.dtype)
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    return InterleavedWords(captions, fragments, norms, query_gram, starts.to(packed.device))


def _grams(fragments: Tensor, captions: InterleavedCaptions) -> Iterator[Tensor]:
    """Inner products [captions, words, words] of each group's captions."""
    for base, size in captions.spans:
        group = fragments[base : base + size * captions.width].view(size, captions.width, -1)
        by_caption = group.transpose(0, 1)
        yield by_caption @ by_caption.transpose(1, 2)


def _triangle(grams: Tensor) -> Tensor:
    """Lower triangles [B, n (n + 1) / 2], row by row, with off-diagonal entries doubled.

    They are padded to multiples of what a thread loads at once.
    """
    row, column = torch.tril_indices(grams.shape[1], grams.shape[2], device=grams.device)
    twice = torch.where(row == column, 1.0, 2.0)
    triangles = grams[:, row, column] * twice.to(grams.dtype)
    return F.pad(triangles, (0, -len(row) % ENTRIES_PER_LOAD))


def _spread(grams: Tensor, captions: InterleavedCaptions, group: int, spec: KernelSpec) -> Tensor:
    """Weights of NAAF's eq. 9 for the captions of a group: [captions, word, from]."""
    lengths = captions.lengths[group * captions.width : (group + 1) * captions.width]
    real = torch.arange(grams.shape[1], device=grams.device)[None, :] < lengths[:, None]
    logits = (spec.gate_scale * grams.float()).masked_fill(~real[:, None, :], -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def thread_per_caption_scores(
    specs: Sequence[KernelSpec], words: InterleavedWords, regions: Regions
) -> Tensor:
    """Scores [I, captions] in single precision, without gradients; the sum over specs.

    Several specs must `share_product`: each block of similarities is computed once.
    """
    images, per_image, _ = regions.fragments.shape
    columns, spec = words.captions.groups * WIDTH, specs[0]
    total = words.norms.new_zeros(images, columns)
    u, v = words.fragments, regions.fragments.flatten(0, 1)
    shift, dtype = 0.0, u.dtype
    if spec.method == "naaf" and u.element_size() < 4:
        if widens(u.device):
            dtype = torch.float32
        else:
            u, v, shift = _less_boundary(u, v, spec.boundary)
    size = dtype.itemsize * max(1, per_image * len(u))
    rows = max(1, min(images, MAX_IMAGES_PER_LAUNCH, BUFFER // size))
    buffer = u.new_empty(rows * per_image, len(u), dtype=dtype)
    triangles = _triangle(regions.gram).float().contiguous()
    longest = max([per_image, *(size for _, size in words.captions.spans)], default=1)
    zeros = torch.zeros(longest + 1, dtype=torch.int32, device=u.device)
    best = words.norms.new_empty(rows, len(u)) if spec.propagation != "none" else words.norms
    scores = words.norms.new_zeros(rows, columns) if len(specs) > 1 else total
    for top in range(0, images if len(u) else 0, rows):
        block = slice(top, min(top + rows, images))
        part = v[block.start * per_image : block.stop * per_image]
        sims = product(part, u, buffer[: len(part)])
        given = sims, words, regions, triangles[block], block, shift, zeros, best
        for number, each in enumerate(specs):
            out = total[block] if number == 0 else scores[: block.stop - block.start]
            _launch(each, *given, out)
            if each.factor != 1.0:
                out *= each.factor
            if number > 0:
                total[block] += out
    return total.index_select(1, words.captions.places)


def _less_boundary(u: Tensor, v: Tensor, boundary: float) -> tuple[Tensor, Tensor, float]:
    """Factors of similarities minus the boundary, around which half precision is then finest."""
    u = torch.cat([u, u.new_ones(len(u), 1), u.new_zeros(len(u), 7)], 1)
    v = torch.cat([v, v.new_full((len(v), 1), -boundary), v.new_zeros(len(v), 7)], 1)
    return u, v, -float(v[0, -8]) if len(v) else boundary


def _launch(
    spec: KernelSpec,
    sims: Tensor,
    words: InterleavedWords,
    regions: Regions,
    triangles: Tensor,
    block: slice,
    shift: float,
    zeros: Tensor,
    best: Tensor,
    out: Tensor,
) -> None:
    from counterfoil.kernels.triton import thread_per_caption_kernels as kernels

    images, per_image = block.stop - block.start, regions.fragments.shape[1]
    masked = regions.mask is not None
    real = regions.mask[block].contiguous().view(torch.uint8) if masked else zeros  # type: ignore[index]
    captions = words.captions
    query_gram = words.query_gram if words.query_gram is not None else sims
    common: dict[str, Any] = {
        "METHOD": spec.method, "HOW": spec.pooling, "ACTIVATION": spec.activation,
        "PROB": spec.prob, "MASKED": masked, "R": per_image, "BC": WIDTH,
        "num_warps": max(1, WIDTH // 32),
    }  # fmt: skip
    if spec.query_side == "text" or spec.method == "chamfer":
        if spec.method in ("scan", "bfan") and not masked and per_image >= FROM_REGIONS:
            common["maxnreg"] = REGISTERS
        kernels.text_queries[(captions.groups, images)](
            sims, triangles, words.norms, query_gram, real, captions.lengths, captions.bases,
            captions.sizes, words.query_gram_at, zeros, best, out,
            images, sims.stride(0), out.stride(0), spec.boundary, spec.scale, spec.lse_scale, shift,
            PROPAGATION=spec.propagation, NEGATIVE=spec.negative, UNIT=spec.unit_words, **common,
        )  # fmt: skip
        return
    launches = [
        (kernels.image_queries, (last - first, images), (
            sims, query_gram, regions.norms[block], real, captions.lengths, captions.bases,
            words.query_gram_at, zeros, out, first, images, sims.stride(0), out.stride(0),
            spec.scale, spec.lse_scale,
        ), {"N": size, **common})
        for first, last, size in _runs([size for _, size in captions.spans])
        if size
    ]  # fmt: skip
    compile_together(launches)
    for kernel, grid, arguments, constants in launches:
        kernel[grid](*arguments, **constants)


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Where each run of equal sizes begins and ends, and the size."""
    first = 0
    for size, run in groupby(sizes):
        last = first + len(list(run))
        yield first, last, size
        first = last
