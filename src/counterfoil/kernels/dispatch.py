"""Dispatch of scoring to the fused kernels, or to PyTorch, per block of pairs.

- Tile kernels (`triton.launch`, `triton.training`): blocks of any size, forward and backward.
- Thread-per-caption kernels (`triton.thread_per_caption`): forward only, for jobs large enough to
  justify their compilation.
- The MaxSim kernel (`maxsim.pooled_maxima`): CHAN in half precision, forward only.
- PyTorch (`tiled`): all other blocks; `try_fused_scores` then returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.core.tensors.precision import product_dtype
from counterfoil.kernels.maxsim import HALVES, pooled_maxima
from counterfoil.kernels.spec import (
    MAX_REGIONS,
    THREAD_PER_CAPTION_CELLS,
    WORDS,
    KernelSpec,
    ScoringJob,
    usable,
)
from counterfoil.kernels.triton.launch import Regions, fused_scores, tiled_words, tiles_of
from counterfoil.kernels.triton.maxsim import fits as offsets_fit
from counterfoil.kernels.triton.packing import Indices
from counterfoil.kernels.triton.thread_per_caption import (
    interleaved_words,
    most_words,
    share_product,
    thread_per_caption_scores,
)
from counterfoil.kernels.triton.training import fits, fused_scores_with_gradient, trainable

MAX_CHAMFER_PRODUCT = 1.01
"""Largest inner product for which smooth-Chamfer's kernel neither overflows nor underflows."""


def try_fused_scores(
    specs: Sequence[KernelSpec],
    images: tuple[Tensor, Tensor],
    texts: tuple[Tensor, Tensor],
    job: ScoringJob,
) -> Tensor | None:
    """Scores [I, T], the sum over specs, of fragments and masks; None if PyTorch must score.

    It must without CUDA or Triton, on GPUs that are too old (before Ampere) or too small, and in
    double precision. It must also if an item has no fragments or more than a tile holds, for
    smooth-Chamfer of other than unit vectors, and in training without a backward kernel.
    """
    (v, real), (u, mask) = images, texts
    wide = torch.promote_types(v.dtype, u.dtype)
    if not specs or not usable(v.device, wide) or not all(spec.possible for spec in specs):
        return None
    if not len(v) or not len(u) or not 0 < v.shape[1] <= MAX_REGIONS:
        return None
    dtype = product_dtype(wide, v.device)
    gradient = torch.is_grad_enabled() and (v.requires_grad or u.requires_grad)
    for spec in specs if gradient else ():
        keys = v.shape[1] if spec.query_side == "text" else u.shape[1]
        if not trainable(spec) or not fits(spec, dtype, keys, v.device):
            return None
    block = _Block(
        Side(u.to(dtype), mask, host_mask(mask)), Side(v.to(dtype), real, host_mask(real)), job
    )
    if not block.supports(specs, gradient):
        return None
    chamfer = any(spec.method == "chamfer" for spec in specs)
    if chamfer and _longest(v) * _longest(u) > MAX_CHAMFER_PRODUCT:
        return None
    from triton.runtime.errors import OutOfResources

    # Triton launches on the current device, whichever the tensors are on
    with torch.cuda.device_of(v), torch.autocast(v.device.type, enabled=False):
        try:
            return block.summed(specs, block.trained) if gradient else block.all_scored(specs)
        except OutOfResources:  # the GPU is too small for the kernels
            return None


def as_words(spec: KernelSpec) -> bool:
    """Whether image queries run in the kernel for words; with gradients they always do."""
    return spec.method == "naaf"


def _longest(fragments: Tensor) -> float:
    return float(fragments.detach().float().norm(dim=-1).max())


@dataclass(frozen=True)
class Side:
    """Fragments [B, N, D] and their mask, on the device and on the host."""

    fragments: Tensor
    mask: Tensor
    host_mask: NDArray[np.bool_]

    @cached_property
    def lengths(self) -> list[int]:
        counts: list[int] = self.host_mask.sum(1).tolist()
        return counts

    @property
    def flat(self) -> Tensor:
        return self.fragments.flatten(0, 1)

    @cached_property
    def where(self) -> Indices:
        """Indices of the real fragments in ``flat``."""
        return np.flatnonzero(self.host_mask)

    def only(self, items: list[int]) -> Side:
        """Some of the items."""
        chosen = torch.tensor(items, device=self.mask.device)
        return Side(
            self.fragments.index_select(0, chosen),
            self.mask.index_select(0, chosen),
            self.host_mask[items],
        )

    @property
    def gaps(self) -> Tensor | None:
        """The mask; None if there is no padding."""
        return self.mask if min(self.lengths) < self.mask.shape[1] else None


@dataclass(frozen=True)
class _Block:
    """Captions and images; every pair of them is scored."""

    texts: Side
    images: Side
    job: ScoringJob

    def supports(self, specs: Sequence[KernelSpec], gradient: bool) -> bool:
        """Whether every item has fragments, and no more than a tile holds."""
        lengths = self.texts.lengths
        if not 0 < min(lengths) <= max(lengths) <= WORDS or not min(self.images.lengths):
            return False
        turned = any(spec.query_side == "image" and (gradient or as_words(spec)) for spec in specs)
        return not turned or max(self.images.lengths) <= WORDS

    @cached_property
    def regions(self) -> Regions:
        return Regions(self.images.fragments, self.images.gaps)

    def turned(self, spec: KernelSpec) -> tuple[_Block, KernelSpec]:
        """Both sides swapped: regions take the role of words, and words that of regions."""
        return _Block(self.images, self.texts, self.job), replace(spec, query_side="text")

    def trained(self, spec: KernelSpec) -> Tensor:
        """Scores with gradients."""
        if spec.query_side == "image":
            block, spec = self.turned(spec)
            return block.trained(spec).T
        texts, images = self.texts, self.images
        packing, words = tiles_of(texts.flat, texts.where, texts.lengths)
        return fused_scores_with_gradient(spec, packing, words, images.fragments, images.gaps)

    def summed(self, specs: Sequence[KernelSpec], score: Callable[[KernelSpec], Tensor]) -> Tensor:
        scores = [score(spec) for spec in specs]
        return scores[0] if len(scores) == 1 else torch.stack(scores).sum(0)

    def all_scored(self, specs: Sequence[KernelSpec]) -> Tensor:
        """Scores without gradients, the sum over specs; they share a product where they can."""
        where, lengths = self.texts.where, self.texts.lengths
        images, per_image, _ = self.images.fragments.shape
        if len(specs) == 1 or not share_product(specs) or not self._large(where):
            return self.summed(specs, self.scored)
        shared = np.asarray(lengths) <= min(most_words(spec, per_image) for spec in specs)
        if shared.all():
            return self.by_thread_per_caption(specs, where, lengths)
        if not shared.any():
            return self.summed(specs, self.scored)
        scores = self.images.fragments.new_empty(images, len(lengths), dtype=torch.float32)
        for together in (True, False):
            captions = np.flatnonzero(shared == together).tolist()
            block = replace(self, texts=self.texts.only(captions))
            scores[:, captions] = (
                block.all_scored(specs) if together else block.summed(specs, block.scored)
            )
        return scores

    def _large(self, where: Indices) -> bool:
        """Whether the job is worth the compilation of the thread-per-caption kernels."""
        images, per_image, _ = self.images.fragments.shape
        return max(self.job.cells, len(where) * images * per_image) >= THREAD_PER_CAPTION_CELLS

    def scored(self, spec: KernelSpec) -> Tensor:
        """Scores without gradients, each caption by lanes or by tiles."""
        if spec.query_side == "image" and as_words(spec):
            # in tiles: lane kernels would be compiled for every caption length
            block, spec = self.turned(spec)
            return block.in_tiles(spec, block.texts.where, block.texts.lengths).T
        images, per_image, width = self.images.fragments.shape
        where, lengths = self.texts.where, self.texts.lengths
        halves = self.images.fragments.dtype in HALVES
        if spec.method == "chan" and halves and offsets_fit(per_image, width):
            return pooled_maxima(
                spec,
                self._words(where),
                torch.tensor(lengths).to(self.texts.mask.device),
                self.images.fragments,
                self.images.gaps,
            )
        if not self._large(where):
            return self.in_tiles(spec, where, lengths)
        suited = np.asarray(lengths) <= most_words(spec, per_image)
        if suited.all():
            return self.by_thread_per_caption([spec], where, lengths)
        if not suited.any():
            return self.in_tiles(spec, where, lengths)
        of_words = np.repeat(suited, lengths)
        scores = self.images.fragments.new_empty(images, len(lengths), dtype=torch.float32)
        for per_thread in (True, False):
            captions = np.flatnonzero(suited == per_thread).tolist()
            chosen = where[of_words == per_thread], [lengths[index] for index in captions]
            scores[:, captions] = (
                self.by_thread_per_caption([spec], *chosen)
                if per_thread
                else self.in_tiles(spec, *chosen)
            )
        return scores

    def in_tiles(self, spec: KernelSpec, where: Indices, lengths: list[int]) -> Tensor:
        words = tiled_words(self.texts.flat, where, lengths, spec)
        return fused_scores(spec, words, self.regions)

    def by_thread_per_caption(
        self, specs: Sequence[KernelSpec], where: Indices, lengths: list[int]
    ) -> Tensor:
        words = interleaved_words(self._words(where), lengths, specs)
        return thread_per_caption_scores(specs, words, self.regions)

    def _words(self, where: Indices) -> Tensor:
        flat = self.texts.flat
        return flat.index_select(0, torch.from_numpy(where).to(flat.device))
