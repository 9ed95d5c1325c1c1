"""Which path scores a block of pairs: a fused kernel where one is made for it, or none."""

from __future__ import annotations

from collections.abc import Sequence

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
from counterfoil.kernels.fused_training import fused_scores_with_gradient, trainable

MANY = 1 << 33
"""Word-region similarities from which on the kernels that take longer to compile pay."""


def fused_pairs(
    recipes: Sequence[Recipe],
    images: tuple[Tensor, Tensor],
    texts: tuple[Tensor, Tensor],
    large: bool = False,
) -> Tensor | None:
    """Scores [I, T], the sum over recipes, of fragments and masks; None where PyTorch has to do it.

    ``large`` says that this is a part of a job for which the kernels that take longer to compile
    pay (`MANY`).

    That is without CUDA or Triton, on GPUs before Ampere, in double precision, with items that
    have no fragments or more than the kernels hold, and in training where there is no backward
    kernel.
    """
    (v, real), (u, mask) = images, texts
    if not recipes or not usable(v.device, v.dtype) or not all(r.possible for r in recipes):
        return None
    gradient = torch.is_grad_enabled() and (v.requires_grad or u.requires_grad)
    if gradient and not all(trainable(recipe) for recipe in recipes):
        return None
    if not len(v) or not len(u) or not 0 < v.shape[1] <= LARGEST_REGIONS:
        return None
    counts = torch.cat([mask.sum(1), real.sum(1)]).tolist()  # the one time the host waits
    lengths, seen = counts[: len(u)], counts[len(u) :]
    if not 0 < min(lengths) <= max(lengths) <= WORDS or not min(seen):
        return None
    masked = min(seen) < v.shape[1]
    order = (~mask.flatten()).to(torch.int8).argsort(stable=True)
    packed = u.flatten(0, 1).index_select(0, order[: sum(lengths)])
    dtype = _multiplied_as(v)
    with torch.autocast(v.device.type, enabled=False):
        regions = describe_regions(v.to(dtype), real if masked else None)
        found = [
            _one(recipe, packed.to(dtype), lengths, regions, gradient, large) for recipe in recipes
        ]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


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
    if (large or len(packed) * images * per_image >= MANY) and suits(recipe, lengths, per_image):
        return lane_scores(recipe, lane_words(packed, lengths, recipe), regions)
    return fused_scores(recipe, pack_words(packed, lengths, recipe), regions)


def _multiplied_as(v: Tensor) -> torch.dtype:
    """The precision of products: mixed precision's where that is on."""
    if v.dtype == torch.float32 and torch.is_autocast_enabled(v.device.type):
        return torch.get_autocast_dtype(v.device.type)
    return v.dtype
