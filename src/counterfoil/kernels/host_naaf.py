"""NAAF's scores on a CPU without gradients, text-to-image: `NAAF.branches` in few passes.

Similarities stand as [C images, K regions, M words], so that sums over regions and over words run
along whole vectors, and wᵀ(VVᵀ)w is one small product an image. They come multiplied by λ, and as
λ ‖u‖ ‖v‖ is bounded, exponentials need no maximum taken off first. In large jobs a compiled
function (`host.c`) reads each of them once; without it PyTorch does the same in a dozen passes.
"""

from __future__ import annotations

import math
from ctypes import CDLL

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.kernels.attention import EPS
from counterfoil.kernels.compiled import LANES, library, pointers
from counterfoil.kernels.fused import SHARPEST, Recipe
from counterfoil.kernels.host_sides import (
    COMPILED_BLOCK,
    HostRegions,
    HostSides,
    Kept,
    for_host,
)
from counterfoil.kernels.side_by_side import Group

TILE = 1 << 17
"""Similarities of a tile for each thread: a few temporaries of this size fit a core's cache."""

BLOCK = 4608
"""Regions multiplied at once: enough for a matrix product to be fast."""

NOTHING = 40.0
"""Below the boundary a weight is e^−40 of what it would be at it: it vanishes in any sum with one
above. Zero itself comes from e^−∞, which takes vector libraries many times as long."""

FEW = 1 / 4
"""Share of words with a region above the boundary, up to which these are picked out."""


def host_naaf(
    recipe: Recipe,
    images: tuple[Tensor, Tensor],
    texts: tuple[Tensor, Tensor],
    kept: Kept | None = None,
) -> Tensor | None:
    """Scores [I, T] of fragments and masks; None where this is not made for them."""
    if recipe.method != "naaf" or recipe.asking != "words" or not 0 < recipe.scale <= SHARPEST:
        return None
    if not for_host(images[0], texts[0]):
        return None
    kept = kept or Kept(large=False)
    sides = HostSides.of(images, texts, kept)
    sharpest = recipe.scale * sides.largest
    if not (sharpest <= SHARPEST and sides.fits(sharpest)):
        return None
    compiled = library() if kept.large else None
    return sides.scores(lambda group: _GroupScores(recipe, sides.regions, group, compiled).all())


class _GroupScores:
    """Scores of all images with one group of captions."""

    def __init__(
        self, recipe: Recipe, regions: HostRegions, group: Group, compiled: CDLL | None
    ) -> None:
        self.recipe, self.regions, self.group, self.compiled = recipe, regions, group, compiled
        self.boundary = recipe.scale * recipe.boundary
        # of context and word; weights above the boundary are no smaller than this power of e
        self.shortest = EPS * recipe.scale * math.exp(min(0.0, max(self.boundary, -SHARPEST)))
        norms = torch.ones_like(group.norms) if recipe.unit_words else group.norms
        self.norms = norms * recipe.scale  # as similarities are
        self.images, self.per_image = regions.gram.shape[:2]
        self.best = norms.new_empty(self.images, len(norms))
        self.effects = torch.empty_like(self.best)

    def all(self) -> Tensor:
        """[images, captions]."""
        per_image = self.per_image * len(self.norms)
        self.step = min(self.images, max(1, TILE * torch.get_num_threads() // per_image))
        at_once = BLOCK if self.compiled is None else COMPILED_BLOCK
        several = min(self.images, max(1, at_once // self.per_image))
        rooms = (2, self.step * per_image) if self.compiled is None else self._compiled_rooms()
        self.rooms = self.norms.new_empty(rooms)
        sims = self.norms.new_empty(several, self.per_image, len(self.norms))
        multiply = self.regions.products.times(self.group.words, self.recipe.scale)
        for first in range(0, self.images, several):
            some = slice(first, min(first + several, self.images))
            block = sims[: some.stop - first]
            factors = multiply(some, block)
            if self.compiled is None:
                self._block(block if factors is None else block.mul_(factors[..., None]), some)
            else:
                self._by_library(self.compiled, block, factors, some)
        if self.recipe.negative:
            self.effects += self._negative()
        by_word = self.effects.view(self.images, *self.group.real.shape)
        return by_word.mul_(self.group.share).sum(1)

    def _compiled_rooms(self) -> tuple[int]:
        return (2 * len(self.norms) + len(self.group.captions) + 2 * LANES * self.per_image,)

    def _by_library(self, library: CDLL, sims: Tensor, factors: Tensor | None, some: slice) -> None:
        """`_block` by `host.c`; similarities are overwritten."""
        scale, real = self.recipe.scale, self.regions.real
        shown = None if real is None else real[some]
        given = sims, factors, self.regions.gram[some], shown, self.norms
        written = self.best[some], self.effects[some], self.rooms
        library.naaf_effects(
            *pointers(*given, *written),
            *(len(sims), self.per_image, *self.group.real.shape),
            *(0.1 if self.recipe.raised == "leaky" else 0.0, scale, EPS * scale),
            *(self.boundary, self.shortest),
        )

    def _block(self, sims: Tensor, some: slice) -> None:
        best, effects, gram = self.best[some], self.effects[some], self.regions.gram[some]
        real = None if self.regions.real is None else self.regions.real[some]
        tiles = [slice(first, first + self.step) for first in range(0, len(sims), self.step)]
        for tile in tiles:
            here = _some(real, tile)
            self._best(sims[tile], here, best[tile])
            self._relevance(sims[tile], here, effects[tile])
        above = best > self.boundary
        images = above.any(1).nonzero()[:, 0]
        most = int(above[images].sum(1).amax()) if len(images) else 0
        if len(images) * most > FEW * best.numel():
            for tile in tiles:
                found = self._feature(sims[tile], _some(real, tile), gram[tile], self.norms)
                effects[tile] += found.mul_(above[tile])
        elif most:
            words = best[images].topk(most, dim=1, sorted=False).indices
            at = images[:, None], words
            picked = sims.transpose(1, 2)[at].transpose(1, 2).contiguous()
            found = self._feature(picked, _some(real, images), gram[images], self.norms[words])
            effects[at] += found.mul_(above[at])

    def _best(self, sims: Tensor, real: Tensor | None, out: Tensor) -> None:
        if real is not None:
            sims = sims.masked_fill(real == 0, -2.0 * self.recipe.scale)
        torch.amax(sims, 1, out=out)

    def _feature(self, sims: Tensor, real: Tensor | None, gram: Tensor, norms: Tensor) -> Tensor:
        """Eq. 10: cosine of each word with the regions above the boundary, weighted.

        Where none is above, what it gives is to be ignored.
        """
        weights, context = self._rooms(sims)
        low = self.boundary - NOTHING
        torch.ops.aten.threshold.out(sims, self.boundary, low, out=weights)
        weights.exp_()
        if real is not None:
            weights *= real
        squared = torch.bmm(gram, weights, out=context).mul_(weights).sum(1)
        lengths = squared.clamp_(min=0).sqrt_().mul_(norms).clamp_(min=self.shortest)
        return weights.mul_(sims).sum(1).div_(lengths)

    def _relevance(self, sims: Tensor, real: Tensor | None, out: Tensor) -> None:
        """Eq. 11: similarity with the regions that a word matches best among its caption's."""
        scale = self.recipe.scale
        weights, squares = self._rooms(sims)
        if self.recipe.raised == "leaky":
            weights.copy_(F.leaky_relu(sims, 0.1))
        else:
            torch.clamp(sims, min=0, out=weights)
        by_word = -1, *self.group.real.shape
        lengths = torch.mul(weights, weights, out=squares).view(by_word).sum(1, keepdim=True)
        factors = lengths.sqrt_().add_(EPS * scale).reciprocal_().mul_(scale)
        weights.view(by_word).mul_(factors)
        weights.exp_()
        if real is not None:
            weights *= real
        total = weights.sum(1).mul_(scale).clamp_(min=torch.finfo(weights.dtype).tiny)
        torch.div(weights.mul_(sims).sum(1), total, out=out)

    def _negative(self) -> Tensor:
        """Eq. 7 and 8, with eq. 9 where it applies: [images, words]."""
        near = self.best.div_(self.recipe.scale).sub_(self.recipe.boundary)
        if self.recipe.gate == "none":
            return near.clamp_(max=0)
        of_captions = near.view(self.images, *self.group.real.shape).permute(2, 1, 0)
        passed = self.group.spread(self.recipe.gate_scale) @ of_captions
        spread = passed.permute(2, 1, 0).reshape(near.shape)
        return near * (spread < 0) if self.recipe.gate == "gate" else spread.clamp_(max=0)

    def _rooms(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for two tensors of a shape."""
        size = like.numel()
        rooms = self.rooms if size <= self.rooms.shape[1] else self.rooms.new_empty(2, size)
        return rooms[0, :size].view(like.shape), rooms[1, :size].view(like.shape)


def _some(real: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    return None if real is None else real[rows]
