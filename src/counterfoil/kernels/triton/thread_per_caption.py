"""Exhaustive scores by `thread_per_caption_kernels`: for many captions and a few dozen regions.

A kernel takes some seconds to compile, once for each method and number of regions on a machine, so
this is for large jobs; the tile kernels (`launch`) score the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.spec import KernelSpec
from counterfoil.kernels.triton.launch import BUFFER, Regions, placed, product, widens
from counterfoil.kernels.triton.packing import InterleavedCaptions, interleave

WIDTH = 128
"""Captions side by side: one for each thread of a program."""

MAX_IMAGES_PER_LAUNCH = (1 << 16) - 1
"""Of one launch: a grid's second side is no longer."""

WORDS_STEP, MAX_IMAGE_QUERY_WORDS, MOST_REGIONS = 4, 24, 40
"""Regions ask: kernels for 4, 8 … 24 words; more regions, or words, than these take too long to
compile and too many registers."""

REGISTERS, FROM_REGIONS = 168, 25
"""Registers of a thread of SCAN's and BFAN's words, and how many regions need so many: three
programs share a multiprocessor then, where the compiler by itself would leave room for two. NAAF,
and masks, need more."""


@dataclass(frozen=True)
class InterleavedWords:
    """Interleaved words, and what the kernels read of them."""

    captions: InterleavedCaptions
    fragments: Tensor
    norms: Tensor
    query_gram: Tensor | None
    query_gram_at: Tensor


def suits(spec: KernelSpec, length: int, regions: int) -> bool:
    """Whether the kernels here are made for captions of this length."""
    if regions > MOST_REGIONS or not spec.possible:
        return False
    return spec.query_side == "text" or length <= MAX_IMAGE_QUERY_WORDS


def interleaved_words(packed: Tensor, lengths: list[int], spec: KernelSpec) -> InterleavedWords:
    """Words of captions, given one after the other, side by side."""
    by_regions = spec.query_side == "image"
    found = interleave(lengths, WIDTH, WORDS_STEP if by_regions else 1)
    moved = found.to(packed.device)
    fragments = placed(packed, moved.rows)
    norms = fragments.float().norm(dim=-1)
    query_gram, sizes = None, [0] * found.groups
    if by_regions or spec.propagation != "none":
        parts = []
        for group, grams in enumerate(_grams(fragments, moved)):
            kept = _triangle(grams) if by_regions else _spread(grams, moved, group, spec)
            parts.append(kept.permute(1, 2, 0) if kept.ndim == 3 else kept.T)
            sizes[group] = kept.numel()
        query_gram = torch.cat([part.flatten() for part in parts]).to(packed.dtype)
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    return InterleavedWords(moved, fragments, norms, query_gram, starts.to(packed.device))


def _grams(fragments: Tensor, found: InterleavedCaptions) -> Iterator[Tensor]:
    """Inner products [captions, words, words] of each group's captions."""
    for base, size in found.spans:
        group = fragments[base : base + size * found.width].view(size, found.width, -1)
        by_caption = group.transpose(0, 1)
        yield by_caption @ by_caption.transpose(1, 2)


def _triangle(grams: Tensor) -> Tensor:
    """Lower triangles [B, n (n + 1) / 2], row by row, with all off the diagonal doubled."""
    row, column = torch.tril_indices(grams.shape[1], grams.shape[2], device=grams.device)
    twice = torch.where(row == column, 1.0, 2.0)
    return grams[:, row, column] * twice.to(grams.dtype)


def _spread(grams: Tensor, found: InterleavedCaptions, group: int, spec: KernelSpec) -> Tensor:
    """NAAF's eq. 9 for the captions of a group: [captions, word, from]."""
    lengths = found.lengths[group * found.width : (group + 1) * found.width]
    real = torch.arange(grams.shape[1], device=grams.device)[None, :] < lengths[:, None]
    logits = (spec.gate_scale * grams.float()).masked_fill(~real[:, None, :], -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def thread_per_caption_scores(
    spec: KernelSpec, words: InterleavedWords, regions: Regions
) -> Tensor:
    """Scores [I, captions] in single precision, without gradients."""
    images, per_image, _ = regions.fragments.shape
    out = words.norms.new_zeros(images, words.captions.groups * WIDTH)
    u, v = words.fragments, regions.fragments.flatten(0, 1)
    shift, kept = 0.0, u.dtype
    if spec.method == "naaf" and u.element_size() < 4:
        if widens(u.device):
            kept = torch.float32
        else:
            u, v, shift = _less_boundary(u, v, spec.boundary)
    size = kept.itemsize * max(1, per_image * len(u))
    rows = max(1, min(images, MAX_IMAGES_PER_LAUNCH, BUFFER // size))
    buffer = u.new_empty(rows * per_image, len(u), dtype=kept)
    triangles = _triangle(regions.gram).float().contiguous()
    longest = max([per_image, *(size for _, size in words.captions.spans)], default=1)
    zeros = torch.zeros(longest + 1, dtype=torch.int32, device=u.device)
    best = words.norms.new_empty(rows, len(u)) if spec.propagation != "none" else words.norms
    for top in range(0, images if len(u) else 0, rows):
        some = slice(top, min(top + rows, images))
        part = v[some.start * per_image : some.stop * per_image]
        sims = product(part, u, buffer[: len(part)])
        _launch(spec, sims, words, regions, triangles[some], some, shift, zeros, best, out[some])
    scores = out.index_select(1, words.captions.places)
    return scores if spec.factor == 1.0 else scores * spec.factor


def _less_boundary(u: Tensor, v: Tensor, boundary: float) -> tuple[Tensor, Tensor, float]:
    """Factors of similarities less the boundary, where half precision is then finest; and that."""
    u = torch.cat([u, u.new_ones(len(u), 1), u.new_zeros(len(u), 7)], 1)
    v = torch.cat([v, v.new_full((len(v), 1), -boundary), v.new_zeros(len(v), 7)], 1)
    return u, v, -float(v[0, -8]) if len(v) else boundary


def _launch(
    spec: KernelSpec,
    sims: Tensor,
    words: InterleavedWords,
    regions: Regions,
    triangles: Tensor,
    some: slice,
    shift: float,
    zeros: Tensor,
    best: Tensor,
    out: Tensor,
) -> None:
    from counterfoil.kernels.triton import thread_per_caption_kernels as kernels

    images, per_image = some.stop - some.start, regions.fragments.shape[1]
    masked = regions.mask is not None
    real = regions.mask[some].contiguous().view(torch.uint8) if masked else zeros  # type: ignore[index]
    found = words.captions
    query_gram = words.query_gram if words.query_gram is not None else sims
    common: dict[str, Any] = {
        "METHOD": spec.method, "HOW": spec.pooling, "ACTIVATION": spec.activation,
        "PROB": spec.prob, "MASKED": masked, "R": per_image, "BC": WIDTH,
        "num_warps": max(1, WIDTH // 32),
    }  # fmt: skip
    if spec.query_side == "text" or spec.method == "chamfer":
        if spec.method in ("scan", "bfan") and not masked and per_image >= FROM_REGIONS:
            common["maxnreg"] = REGISTERS
        kernels.words_ask[(found.groups, images)](
            sims, triangles, words.norms, query_gram, real, found.lengths, found.bases, found.sizes,
            words.query_gram_at, zeros, best, out, images, sims.stride(0), out.stride(0),
            spec.boundary, spec.scale, spec.lse_scale, shift,
            PROPAGATION=spec.propagation, NEGATIVE=spec.negative, UNIT=spec.unit_words, **common,
        )  # fmt: skip
        return
    first = 0
    sizes = [size for _, size in found.spans]
    while first < len(sizes):
        last = first
        while last < len(sizes) and sizes[last] == sizes[first]:
            last += 1
        if sizes[first]:
            kernels.regions_ask[(last - first, images)](
                sims, query_gram, regions.norms[some], real, found.lengths, found.bases,
                words.query_gram_at, zeros, out, first, images, sims.stride(0), out.stride(0),
                spec.scale, spec.lse_scale, N=sizes[first], **common,
            )  # fmt: skip
        first = last
