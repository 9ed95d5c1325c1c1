"""Which path scores a block of pairs: a fused kernel where one is made for it, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from counterfoil.data.on_host import on_host
from counterfoil.kernels.fused import (
    LARGEST_REGIONS,
    WORDS,
    Recipe,
    Regions,
    fused_scores,
    tiled_words,
    tiles_of,
    usable,
)
from counterfoil.kernels.fused_lanes import lane_scores, lane_words, suits
from counterfoil.kernels.fused_training import fits, fused_scores_with_gradient, trainable
from counterfoil.kernels.packing import Indices

MANY = 1 << 33
"""Word-region similarities from which on the kernels that take longer to compile pay."""

UNIT = 1.01
"""Largest inner product for which smooth-Chamfer's kernel neither overflows nor underflows."""


def fused_pairs(
    recipes: Sequence[Recipe],
    images: tuple[Tensor, Tensor],
    texts: tuple[Tensor, Tensor],
    large: bool = False,
) -> Tensor | None:
    """Scores [I, T], the sum over recipes, of fragments and masks; None where PyTorch has to do it.

    ``large`` says that this is a part of a job for which the kernels that take longer to compile
    pay (`MANY`).

    That is without CUDA or Triton, on GPUs before Ampere or too small, in double precision, with
    items that have no fragments or more than the kernels hold, for smooth-Chamfer of other than
    unit vectors, and in training where there is no backward kernel.
    """
    (v, real), (u, mask) = images, texts
    wide = torch.promote_types(v.dtype, u.dtype)
    if not recipes or not usable(v.device, wide) or not all(r.possible for r in recipes):
        return None
    if not len(v) or not len(u) or not 0 < v.shape[1] <= LARGEST_REGIONS:
        return None
    dtype = _multiplied_as(wide, v.device)
    gradient = torch.is_grad_enabled() and (v.requires_grad or u.requires_grad)
    for recipe in recipes if gradient else ():
        if not trainable(recipe) or not fits(recipe, dtype, v.shape[1], v.device):
            return None
    said, shown = on_host(mask), on_host(real)
    lengths, seen = said.sum(1).tolist(), shown.sum(1)
    if not 0 < min(lengths) <= max(lengths) <= WORDS or not seen.min():
        return None
    masked = bool(seen.min() < v.shape[1])
    if any(recipe.method == "chamfer" for recipe in recipes) and _longest(v) * _longest(u) > UNIT:
        return None
    from triton.runtime.errors import OutOfResources

    # Triton launches on the current device, whichever the tensors are on
    with torch.cuda.device_of(v), torch.autocast(v.device.type, enabled=False):
        job = _Job(
            u.flatten(0, 1).to(dtype),
            np.flatnonzero(said),
            lengths,
            v.to(dtype),
            real if masked else None,
            large,
        )
        try:
            found = [job.trained(recipe) if gradient else job.scored(recipe) for recipe in recipes]
        except OutOfResources:  # a smaller GPU than the kernels are made for
            return None
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _longest(fragments: Tensor) -> float:
    return float(fragments.detach().float().norm(dim=-1).max())


@dataclass(frozen=True)
class _Job:
    """Words at ``where`` in ``flat``, caption after caption, and regions."""

    flat: Tensor
    where: Indices
    lengths: list[int]
    v: Tensor
    mask: Tensor | None
    large: bool

    @cached_property
    def regions(self) -> Regions:
        return Regions(self.v, self.mask)

    def trained(self, recipe: Recipe) -> Tensor:
        packing, words = tiles_of(self.flat, self.where, self.lengths)
        return fused_scores_with_gradient(recipe, packing, words, self.v, self.mask)

    def scored(self, recipe: Recipe) -> Tensor:
        images, per_image, _ = self.v.shape
        if not self.large and len(self.where) * images * per_image < MANY:
            return self.in_tiles(recipe, self.where, self.lengths)
        side_by_side = [suits(recipe, length, per_image) for length in self.lengths]
        if all(side_by_side):
            return self.in_lanes(recipe, self.where, self.lengths)
        if not any(side_by_side):
            return self.in_tiles(recipe, self.where, self.lengths)
        of_words = np.repeat(side_by_side, self.lengths)
        scores = self.v.new_empty(images, len(self.lengths), dtype=torch.float32)
        for lanes, way in ((True, self.in_lanes), (False, self.in_tiles)):
            some = [place for place, here in enumerate(side_by_side) if here == lanes]
            found = way(recipe, self.where[of_words == lanes], [self.lengths[at] for at in some])
            scores[:, some] = found
        return scores

    def in_tiles(self, recipe: Recipe, where: Indices, lengths: list[int]) -> Tensor:
        return fused_scores(recipe, tiled_words(self.flat, where, lengths, recipe), self.regions)

    def in_lanes(self, recipe: Recipe, where: Indices, lengths: list[int]) -> Tensor:
        packed = self.flat.index_select(0, torch.from_numpy(where).to(self.flat.device))
        return lane_scores(recipe, lane_words(packed, lengths, recipe), self.regions)


def _multiplied_as(wide: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of products: mixed precision's where that is on."""
    if wide == torch.float32 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return wide
