"""SCAN's and BFAN's scores on a CPU without gradients, in large jobs: one product of all words with
all regions for both directions, then a compiled function (`host.c`) that reads similarities from
the cache. Without a compiler PyTorch scores them as it does elsewhere (`SimilarityMatcher.eager`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor

from counterfoil.kernels.attention import EPS, TIE
from counterfoil.kernels.compiled import LANES, library, pointers
from counterfoil.kernels.fused import SHARPEST, Recipe
from counterfoil.kernels.host_sides import COMPILED_BLOCK, HostRegions, HostSides, Kept, for_host
from counterfoil.kernels.side_by_side import Group

LARGEST = 1e6
"""Of similarities: the squares of larger ones may leave single precision when they are summed."""


def host_attention(
    recipes: Sequence[Recipe],
    images: tuple[Tensor, Tensor],
    texts: tuple[Tensor, Tensor],
    kept: Kept | None,
) -> Tensor | None:
    """Scores [I, T] of fragments and masks, recipes added up; None where this is not for them."""
    if kept is None or not kept.large or not recipes or not all(map(_suits, recipes)):
        return None
    if not for_host(images[0], texts[0]) or not all(
        bool(x[1].any(1).all()) for x in (images, texts)
    ):
        return None
    compiled = library()
    if compiled is None:
        return None
    sides = HostSides.of(images, texts, kept)
    if not (sides.largest <= LARGEST and all(sides.fits(recipe.scale) for recipe in recipes)):
        return None
    return sides.scores(lambda group: _GroupScores(recipes, sides.regions, group, compiled).all())


def _suits(recipe: Recipe) -> bool:
    pooled = recipe.pooling in ("lse", "mean", "max", "sum") and recipe.factor == 1.0
    return recipe.method in ("scan", "bfan") and pooled and 0 < recipe.scale <= SHARPEST


class _GroupScores:
    """Scores of all images with one group of captions."""

    def __init__(
        self, recipes: Sequence[Recipe], regions: HostRegions, group: Group, compiled: CDLL
    ) -> None:
        self.recipes, self.regions, self.group, self.compiled = recipes, regions, group, compiled
        self.images, self.per_image = regions.gram.shape[:2]
        self.places, self.captions = group.real.shape
        asking = {recipe.asking for recipe in recipes}
        if "regions" in asking:
            of_caption = group.words.view(self.places, self.captions, -1).transpose(0, 1).float()
            kin = of_caption @ of_caption.transpose(1, 2)  # [captions, places, places]
            self.kin = kin.permute(1, 2, 0).contiguous()
            self.said = group.real.float()
            self.lengths = regions.gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        self.norms = group.norms.contiguous()

    def all(self) -> Tensor:
        """[images, captions]."""
        words = len(self.norms)
        several = min(self.images, max(1, COMPILED_BLOCK // self.per_image))
        largest = max(2 * self.per_image, 2 * self.places)
        self.rooms = self.norms.new_empty(
            LANES * largest + self.per_image * words + words + self.captions
        )
        sims = self.norms.new_empty(several, self.per_image, words)
        scores = self.norms.new_empty(self.images, self.captions)
        multiply = self.regions.products.times(self.group.words, 1.0)
        for first in range(0, self.images, several):
            some = slice(first, min(first + several, self.images))
            block = sims[: some.stop - first]
            factors = multiply(some, block)
            for number, recipe in enumerate(self.recipes):  # the first multiplies the factors in
                found = self._of_words if recipe.asking == "words" else self._of_regions
                part = found(recipe, block, None if number else factors, some)
                scores[some] = part if not number else scores[some] + part
        return scores

    def _of_words(
        self, recipe: Recipe, sims: Tensor, factors: Tensor | None, some: slice
    ) -> Tensor:
        cosines = self.norms.new_empty(len(sims), self.places, self.captions)
        given = sims, factors, self.regions.gram[some], self._real(some), self.norms
        self.compiled.word_cosines(
            *pointers(*given, cosines, self.rooms), *self._told(recipe, sims)
        )
        return pooled(cosines, self.group.real, recipe)

    def _of_regions(
        self, recipe: Recipe, sims: Tensor, factors: Tensor | None, some: slice
    ) -> Tensor:
        cosines = self.norms.new_empty(len(sims), self.per_image, self.captions)
        real = self._real(some)
        given = sims, factors, self.kin, real, self.said, self.lengths[some]
        self.compiled.region_cosines(
            *pointers(*given, cosines, self.rooms), *self._told(recipe, sims)
        )
        return pooled(cosines, None if real is None else real.bool(), recipe)

    def _real(self, some: slice) -> Tensor | None:
        return None if self.regions.real is None else self.regions.real[some]

    def _told(self, recipe: Recipe, sims: Tensor) -> tuple[float, ...]:
        """Sizes and settings, as the functions take them."""
        slope = {"leaky": 0.1, "relu": 0.0, "none": 1.0}[recipe.raised]
        focus = 0 if recipe.method == "scan" else 2 if recipe.prob else 1
        sizes = len(sims), self.per_image, self.places, self.captions
        return (*sizes, slope, recipe.scale, EPS, TIE, focus)


def pooled(parts: Tensor, real: Tensor | None, recipe: Recipe) -> Tensor:
    """Cosines [images, fragments, captions] of real fragments to scores [images, captions]."""
    if recipe.pooling in ("lse", "max"):
        parts = parts if real is None else parts.masked_fill(~real, -torch.inf)
        if recipe.pooling == "max":
            return parts.amax(1)
        return (recipe.sharpness * parts).logsumexp(1) / recipe.sharpness
    total = (parts if real is None else parts * real).sum(1)
    if recipe.pooling == "sum":
        return total
    return total / (parts.shape[1] if real is None else real.sum(-2))
