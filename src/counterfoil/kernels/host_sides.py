"""Both sides of a job on a CPU: regions, of which much is computed once for all captions, and
captions in groups, which are scored at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from counterfoil.kernels.host_products import Products, products_of
from counterfoil.kernels.side_by_side import Group, side_by_side
from counterfoil.kernels.workers import in_parallel

COMPILED_BLOCK = 1152
"""Regions multiplied at once where a compiled function then reads each similarity from a core's
cache, as far as it holds them."""

ROOM = 88.0
"""Below log of what single precision holds."""

PARALLEL = 1 << 20
"""Similarities of a job from which on groups of captions are scored at the same time."""


@dataclass(frozen=True)
class HostRegions:
    """Regions ready to be multiplied, their inner products [C, K, K], the longest's length, and
    which are real [C, K, 1] as numbers; None: all of them. ``of`` are the fragments as given."""

    of: Tensor
    products: Products
    gram: Tensor
    longest: float
    real: Tensor | None


@dataclass
class Kept:
    """What one part of a large job leaves for the next part with the same images.

    Where ``large``, there are enough similarities to gain by rounding them (`digits`) and by
    compiled functions.
    """

    large: bool
    regions: HostRegions | None = None

    def regions_of(self, given: Tensor, mask: Tensor, dtype: torch.dtype) -> HostRegions:
        """What is kept, if it is of these very fragments: another thread may score others."""
        held = self.regions
        if held is None or held.of is not given:
            held = self.regions = describe(given, mask, dtype, self.large)
        return held


def describe(given: Tensor, mask: Tensor, dtype: torch.dtype, rounded: bool) -> HostRegions:
    """Regions [C, K, D] with what is computed of them once for all texts."""
    v = given.to(dtype)
    real = None if bool(mask.all()) else mask[..., None].float().contiguous()
    v = v.contiguous() if real is None else v * real.to(v.dtype)
    gram = torch.bmm(v, v.transpose(1, 2)).float()
    longest = float(gram.diagonal(dim1=1, dim2=2).amax().sqrt())
    return HostRegions(given, products_of(v, rounded), gram, longest, real)


def for_host(v: Tensor, u: Tensor) -> bool:
    """Whether fragments are on a CPU, there are any, and no gradient or double precision of them
    is wanted."""
    if v.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and (v.requires_grad or u.requires_grad):
        return False
    return torch.float64 not in (v.dtype, u.dtype) and bool(v.numel() and u.numel())


@dataclass(frozen=True)
class HostSides:
    """Regions and groups of captions; ``shape`` and ``dtype`` are those of the scores."""

    regions: HostRegions
    groups: list[Group]
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor], kept: Kept
    ) -> HostSides:
        """Of fragments and masks."""
        (v, real), (u, mask) = images, texts
        wide = torch.promote_types(v.dtype, u.dtype)
        dtype = torch.float32 if wide == torch.float16 else wide
        regions = kept.regions_of(v, real, dtype)
        groups = [*side_by_side(u.to(dtype), mask)]
        groups.sort(key=lambda group: -len(group.words))  # the last to finish is then a small one
        return cls(regions, groups, (len(v), len(u)), wide)

    @cached_property
    def longest_word(self) -> float:
        """Its length; NaN where one is not a number."""
        if not self.groups:
            return 0.0
        return float(torch.stack([group.norms.amax() for group in self.groups]).amax())

    @property
    def largest(self) -> float:
        """What no similarity is larger than; NaN where a fragment is not a number."""
        return self.longest_word * self.regions.longest

    def fits(self, sharpest: float) -> bool:
        """Whether sums of weights of up to e^sharpest, squared, fit single precision."""
        most = max(self.regions.gram.shape[1], *(len(group.real) for group in self.groups), 1)
        longest = max(self.regions.longest, self.longest_word, 1.0)
        return 2 * (sharpest + math.log(most * longest)) < ROOM  # False of what is not a number

    def scores(self, of_group: Callable[[Group], Tensor]) -> Tensor:
        """All scores [I, T], from those of all images with a group [I, captions]."""
        words = sum(len(group.words) for group in self.groups)
        cells = words * self.regions.gram.shape[0] * self.regions.gram.shape[1]
        scores = torch.zeros(self.shape)
        with torch.no_grad():
            side = in_parallel if cells >= PARALLEL else map
            for group, columns in zip(self.groups, side(of_group, self.groups), strict=True):
                scores.index_copy_(1, group.captions, columns)
        return scores.to(self.dtype)
