"""Which path scores a block of pairs: a fused kernel where one is made for it, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from counterfoil.kernels.fused import (
    LARGEST_REGIONS,
    WORDS,
    Recipe,
    Regions,
    describe_regions,
    fused_scores,
    pack_words,
    usable,
)
from counterfoil.kernels.fused_lanes import lane_scores, lane_words, suits
from counterfoil.kernels.fused_training import fits, fused_scores_with_gradient, trainable

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
    counts = torch.cat([mask.sum(1), real.sum(1)]).tolist()  # the one time the host waits
    lengths, seen = counts[: len(u)], counts[len(u) :]
    if not 0 < min(lengths) <= max(lengths) <= WORDS or not min(seen):
        return None
    masked = min(seen) < v.shape[1]
    order = (~mask.flatten()).to(torch.int8).argsort(stable=True)
    packed = u.flatten(0, 1).index_select(0, order[: sum(lengths)])
    if any(recipe.method == "chamfer" for recipe in recipes) and _longest(v) * _longest(u) > UNIT:
        return None
    from triton.runtime.errors import OutOfResources

    # Triton launches on the current device, whichever the tensors are on
    with torch.cuda.device_of(v), torch.autocast(v.device.type, enabled=False):
        regions = describe_regions(v.to(dtype), real if masked else None)
        words = packed.to(dtype)
        try:
            found = [_one(recipe, words, lengths, regions, gradient, large) for recipe in recipes]
        except OutOfResources:  # a smaller GPU than the kernels are made for
            return None
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _longest(fragments: Tensor) -> float:
    return float(fragments.detach().float().norm(dim=-1).max())


def _one(
    recipe: Recipe,
    packed: Tensor,
    lengths: list[int],
    regions: Regions,
    gradient: bool,
    large: bool,
) -> Tensor:
    if gradient:
        return fused_scores_with_gradient(recipe, pack_words(packed, lengths, recipe), regions)
    images, per_image, _ = regions.fragments.shape
    if not large and len(packed) * images * per_image < MANY:
        return fused_scores(recipe, pack_words(packed, lengths, recipe), regions)
    side_by_side = [suits(recipe, length, per_image) for length in lengths]
    if all(side_by_side):
        return lane_scores(recipe, lane_words(packed, lengths, recipe), regions)
    if not any(side_by_side):
        return fused_scores(recipe, pack_words(packed, lengths, recipe), regions)
    of_words = np.repeat(side_by_side, lengths)
    scores = regions.norms.new_empty(images, len(lengths))
    for lanes in (True, False):
        some = [place for place, here in enumerate(side_by_side) if here == lanes]
        rows = torch.from_numpy(np.flatnonzero(of_words == lanes)).to(packed.device)
        words = packed.index_select(0, rows)
        their = [lengths[place] for place in some]
        if lanes:
            found = lane_scores(recipe, lane_words(words, their, recipe), regions)
        else:
            found = fused_scores(recipe, pack_words(words, their, recipe), regions)
        scores[:, some] = found
    return scores


def _multiplied_as(wide: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of products: mixed precision's where that is on."""
    if wide == torch.float32 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return wide
