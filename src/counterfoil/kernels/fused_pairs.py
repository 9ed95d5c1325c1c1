"""Which path scores a block of pairs: a fused kernel where one is made for it, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
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
        answers = v.shape[1] if recipe.asking == "words" else u.shape[1]
        if not trainable(recipe) or not fits(recipe, dtype, answers, v.device):
            return None
    shown, said = Side(v.to(dtype), real, on_host(real)), Side(u.to(dtype), mask, on_host(mask))
    if not 0 < min(said.lengths) <= max(said.lengths) <= WORDS or not min(shown.lengths):
        return None
    turned = any(
        recipe.asking == "regions" and (gradient or as_words(recipe)) for recipe in recipes
    )
    if turned and max(shown.lengths) > WORDS:
        return None
    if any(recipe.method == "chamfer" for recipe in recipes) and _longest(v) * _longest(u) > UNIT:
        return None
    from triton.runtime.errors import OutOfResources

    # Triton launches on the current device, whichever the tensors are on
    with torch.cuda.device_of(v), torch.autocast(v.device.type, enabled=False):
        job = _Job(said, shown, large)
        try:
            found = [job.trained(recipe) if gradient else job.scored(recipe) for recipe in recipes]
        except OutOfResources:  # a smaller GPU than the kernels are made for
            return None
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def as_words(recipe: Recipe) -> bool:
    """Whether regions ask by the kernel in which words do; with gradients they always do."""
    return recipe.method == "naaf"


def _longest(fragments: Tensor) -> float:
    return float(fragments.detach().float().norm(dim=-1).max())


@dataclass(frozen=True)
class Side:
    """Fragments [B, N, D] and which are real, on the device and on the host."""

    fragments: Tensor
    mask: Tensor
    known: NDArray[np.bool_]

    @cached_property
    def lengths(self) -> list[int]:
        found: list[int] = self.known.sum(1).tolist()
        return found

    @property
    def flat(self) -> Tensor:
        return self.fragments.flatten(0, 1)

    @cached_property
    def where(self) -> Indices:
        """Of the real ones in ``flat``."""
        return np.flatnonzero(self.known)

    @property
    def gaps(self) -> Tensor | None:
        """The mask, where not all are real."""
        return self.mask if min(self.lengths) < self.mask.shape[1] else None


@dataclass(frozen=True)
class _Job:
    """Captions and images, all of which are to be scored with each other."""

    texts: Side
    images: Side
    large: bool

    @cached_property
    def regions(self) -> Regions:
        return Regions(self.images.fragments, self.images.gaps)

    def turned(self, recipe: Recipe) -> tuple[_Job, Recipe]:
        """Regions as words: an image is then a caption, and a caption an image of words."""
        return _Job(self.images, self.texts, self.large), replace(recipe, asking="words")

    def trained(self, recipe: Recipe) -> Tensor:
        """With gradients."""
        if recipe.asking == "words":
            return _trained(recipe, self.texts, self.images)
        job, recipe = self.turned(recipe)
        return job.trained(recipe).T

    def scored(self, recipe: Recipe) -> Tensor:
        if recipe.asking == "regions" and as_words(recipe):
            # in tiles: the other kernels would be compiled for every length of captions
            job, recipe = self.turned(recipe)
            return job.in_tiles(recipe, job.texts.where, job.texts.lengths).T
        images, per_image, _ = self.images.fragments.shape
        where, lengths = self.texts.where, self.texts.lengths
        if not self.large and len(where) * images * per_image < MANY:
            return self.in_tiles(recipe, where, lengths)
        side_by_side = [suits(recipe, length, per_image) for length in lengths]
        if all(side_by_side):
            return self.in_lanes(recipe, where, lengths)
        if not any(side_by_side):
            return self.in_tiles(recipe, where, lengths)
        of_words = np.repeat(side_by_side, lengths)
        scores = self.images.fragments.new_empty(images, len(lengths), dtype=torch.float32)
        for lanes, way in ((True, self.in_lanes), (False, self.in_tiles)):
            some = [place for place, here in enumerate(side_by_side) if here == lanes]
            found = way(recipe, where[of_words == lanes], [lengths[at] for at in some])
            scores[:, some] = found
        return scores

    def in_tiles(self, recipe: Recipe, where: Indices, lengths: list[int]) -> Tensor:
        words = tiled_words(self.texts.flat, where, lengths, recipe)
        return fused_scores(recipe, words, self.regions)

    def in_lanes(self, recipe: Recipe, where: Indices, lengths: list[int]) -> Tensor:
        flat = self.texts.flat
        packed = flat.index_select(0, torch.from_numpy(where).to(flat.device))
        return lane_scores(recipe, lane_words(packed, lengths, recipe), self.regions)


def _trained(recipe: Recipe, asking: Side, answering: Side) -> Tensor:
    packing, asked = tiles_of(asking.flat, asking.where, asking.lengths)
    return fused_scores_with_gradient(recipe, packing, asked, answering.fragments, answering.gaps)


def _multiplied_as(wide: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of products: mixed precision's where that is on."""
    if wide == torch.float32 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return wide
