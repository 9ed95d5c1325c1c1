"""Scores by `thread_per_caption_kernels`, for large jobs with at most a few dozen regions.

A kernel takes several seconds to compile, per method and number of regions, so small jobs use the
tile kernels (`launch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.tensors.device import free_memory
from counterfoil.kernels.spec import ENTRIES_PER_LOAD, WORDS, KernelSpec
from counterfoil.kernels.triton.compilation import Launch, compile_together
from counterfoil.kernels.triton.launch import BUFFER, Regions, placed, product, widens
from counterfoil.kernels.triton.packing import InterleavedCaptions, interleave

WIDTH = 128
"""Captions per group: one for each thread of a program."""

MAX_IMAGES_PER_LAUNCH = (1 << 16) - 1
"""Limit of a grid's second dimension."""

WORDS_STEP, MAX_IMAGE_QUERY_WORDS, MOST_REGIONS = 4, 24, 40
"""Image queries: kernels for 4, 8 … 24 words. More regions, or words, take too long to compile and
too many registers."""

STRIDE = 1 << 15
"""Words of a chunk. The distance of regions in memory is a compile-time constant, so that loads
need no arithmetic for their addresses, which was a fifth of all instructions."""

MOST_GROUPS = 128
"""Groups of captions whose Gram matrices are computed together. It limits memory, and batches of
2¹⁶ products in half precision have been wrong (github.com/pytorch/pytorch/issues/25241)."""

REGISTERS, FROM_REGIONS = 168, 25
"""Register limit per thread for text queries of SCAN, BFAN and NAAF, and from how many regions on:
three programs then share a multiprocessor instead of two, for a few spilled bytes. With masks more
would spill."""


@dataclass(frozen=True)
class InterleavedWords:
    """Interleaved words, with their norms and Gram matrices."""

    captions: InterleavedCaptions
    fragments: Tensor
    norms: Tensor
    query_gram: Tensor | None
    query_gram_at: Tensor


def most_words(spec: KernelSpec, regions: int) -> int:
    """Words of the longest caption that the kernels support; 0 if they support none."""
    if regions > MOST_REGIONS or not spec.possible:
        return 0
    return WORDS if spec.query_side == "text" else MAX_IMAGE_QUERY_WORDS


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
        for first, last, size in _runs([size for _, size in captions.spans], MOST_GROUPS):
            grams = _grams(fragments, captions, first, last, size)
            if by_regions:
                fours = _triangle(grams).unflatten(-1, (-1, ENTRIES_PER_LOAD))
                part = fours.transpose(1, 2)
            else:
                own = captions.lengths[first * WIDTH : last * WIDTH].view(-1, WIDTH)
                part = _spread(grams, own, spec).permute(0, 2, 3, 1)
            parts.append(part.flatten())
            sizes[first:last] = [part[0].numel()] * len(part)
        query_gram = torch.cat(parts).to(packed.dtype)
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    return InterleavedWords(captions, fragments, norms, query_gram, starts.to(packed.device))


def _grams(
    fragments: Tensor, captions: InterleavedCaptions, first: int, last: int, size: int
) -> Tensor:
    """Inner products [groups, captions, words, words] in groups of one size."""
    start = captions.spans[first][0]
    words = fragments[start : start + (last - first) * size * WIDTH]
    by_caption = words.view(last - first, size, WIDTH, fragments.shape[1]).transpose(1, 2)
    return by_caption @ by_caption.mT


def _triangle(grams: Tensor) -> Tensor:
    """Lower triangles [..., n (n + 1) / 2], row by row, with off-diagonal entries doubled.

    They are padded to multiples of what a thread loads at once.
    """
    row, column = torch.tril_indices(*grams.shape[-2:], device=grams.device)
    twice = torch.where(row == column, 1.0, 2.0)
    triangles = grams[..., row, column] * twice.to(grams.dtype)
    return F.pad(triangles, (0, -len(row) % ENTRIES_PER_LOAD))


def _spread(grams: Tensor, lengths: Tensor, spec: KernelSpec) -> Tensor:
    """Weights of NAAF's eq. 9 in groups of captions: [groups, captions, word, from]."""
    real = torch.arange(grams.shape[-1], device=grams.device) < lengths[..., None]
    logits = (spec.gate_scale * grams.float()).masked_fill(~real[:, :, None, :], -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


@dataclass(frozen=True)
class Chunk:
    """Consecutive groups of captions, whose similarities are in memory at once."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def words(self) -> slice:
        return slice(self.start, self.stop)


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
    size = dtype.itemsize * per_image * STRIDE
    rows = max(1, min(images, MAX_IMAGES_PER_LAUNCH, _buffer(u.device) // size))
    sims = u.new_empty(rows * per_image, STRIDE, dtype=dtype)
    triangles = _triangle(regions.gram).float().contiguous()
    longest = max([per_image, *(size for _, size in words.captions.spans)], default=1)
    zeros = torch.zeros(longest + 1, dtype=torch.int32, device=u.device)
    best = words.norms.new_empty(rows, STRIDE) if spec.propagation != "none" else words.norms
    others = [words.norms.new_zeros(rows, columns) for _ in specs[1:]]
    chunks = _chunks(words.captions.spans)
    for top in range(0, images, rows):
        block = slice(top, min(top + rows, images))
        part = v[block.start * per_image : block.stop * per_image]
        outs = [total[block], *(scores[: block.stop - block.start] for scores in others)]
        given = _Block(words, regions, triangles[block], block, sims, best, zeros, shift)
        launches = [
            [launch for each, out in zip(specs, outs, strict=True)
             for launch in given.launches(each, chunk, out)]
            for chunk in chunks
        ]  # fmt: skip
        if top == 0:
            compile_together(_distinct(chain.from_iterable(launches)))
        for chunk, of_chunk in zip(chunks, launches, strict=True):
            own = u[chunk.words]
            product(part, own, sims[: len(part), : len(own)])
            for kernel, grid, arguments, constants in of_chunk:
                kernel[grid](*arguments, **constants)
        for number, (each, out) in enumerate(zip(specs, outs, strict=True)):
            if each.factor != 1.0:
                out *= each.factor
            if number > 0:
                total[block] += out
    return total.index_select(1, words.captions.places)


def _buffer(device: torch.device) -> int:
    """Bytes of similarities held at once: more if more is free, for fewer launches."""
    return min(4 * BUFFER, free_memory(device) // 8) if device.type == "cuda" else BUFFER


def _chunks(spans: Sequence[tuple[int, int]]) -> list[Chunk]:
    """As many groups at a time as have at most STRIDE words, padding included."""
    chunks: list[Chunk] = []
    for group, (start, size) in enumerate(spans):
        stop = start + size * WIDTH
        if chunks and stop - chunks[-1].start <= STRIDE:
            chunks[-1] = replace(chunks[-1], last=group + 1, stop=stop)
        else:
            chunks.append(Chunk(group, group + 1, start, stop))
    return chunks


def _distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of each kernel with the same constants."""
    return list({(id(one[0]), *sorted(one[3].items())): one for one in launches}.values())


def _less_boundary(u: Tensor, v: Tensor, boundary: float) -> tuple[Tensor, Tensor, float]:
    """Factors of similarities minus the boundary, around which half precision is then finest."""
    u = torch.cat([u, u.new_ones(len(u), 1), u.new_zeros(len(u), 7)], 1)
    v = torch.cat([v, v.new_full((len(v), 1), -boundary), v.new_zeros(len(v), 7)], 1)
    return u, v, -float(v[0, -8]) if len(v) else boundary


@dataclass(frozen=True)
class _Block:
    """A block of images, and what the kernels read of it; ``sims`` are of one chunk at a time."""

    words: InterleavedWords
    regions: Regions
    triangles: Tensor
    images: slice
    sims: Tensor
    best: Tensor
    zeros: Tensor
    shift: float

    def launches(self, spec: KernelSpec, chunk: Chunk, out: Tensor) -> list[Launch]:
        """Kernels that write the scores of a chunk's captions to ``out`` [images, captions]."""
        from counterfoil.kernels.triton import thread_per_caption_kernels as kernels

        count, per_image = len(out), self.regions.fragments.shape[1]
        mask, words, captions = self.regions.mask, self.words, self.words.captions
        real = self.zeros if mask is None else mask[self.images].contiguous().view(torch.uint8)
        query_gram = words.query_gram if words.query_gram is not None else self.sims
        common: dict[str, Any] = {
            "METHOD": spec.method, "HOW": spec.pooling, "ACTIVATION": spec.activation,
            "PROB": spec.prob, "MASKED": mask is not None, "R": per_image, "BC": WIDTH,
            "STRIDE": STRIDE, "num_warps": max(1, WIDTH // 32),
        }  # fmt: skip
        if spec.query_side == "text" or spec.method == "chamfer":
            limited = spec.method in ("scan", "bfan", "naaf")
            if limited and mask is None and per_image >= FROM_REGIONS:
                common["maxnreg"] = REGISTERS
            arguments = (
                self.sims, self.triangles, words.norms, query_gram, real, captions.lengths,
                captions.bases, captions.sizes, words.query_gram_at, self.zeros, self.best, out,
                chunk.first, chunk.start, out.stride(0), spec.boundary, spec.scale, spec.lse_scale,
                self.shift,
            )  # fmt: skip
            kinds = {
                "PROPAGATION": spec.propagation,
                "NEGATIVE": spec.negative,
                "UNIT": spec.unit_words,
            }
            grid = chunk.last - chunk.first, count
            return [(kernels.text_queries, grid, arguments, {**kinds, **common})]
        sizes = [size for _, size in captions.spans[chunk.first : chunk.last]]
        norms = self.regions.norms[self.images]
        return [
            (kernels.image_queries, (last - first, count), (
                self.sims, query_gram, norms, real, captions.lengths, captions.bases,
                words.query_gram_at, self.zeros, out, chunk.first + first, chunk.start,
                out.stride(0), spec.scale, spec.lse_scale,
            ), {"N": size, **common})
            for first, last, size in _runs(sizes)
            if size
        ]  # fmt: skip


def _runs(sizes: list[int], most: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Where each run of equal sizes begins and ends, and the size; runs of ``most`` at most."""
    first = 0
    for size, run in groupby(sizes):
        last = first + len(list(run))
        for start in range(first, last, most or last - first):
            yield start, min(start + (most or last - first), last), size
        first = last
