"""`LocalMatcher`: what every matcher of words with regions shares."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from counterfoil.collectives import gather_counts
from counterfoil.encoders.encoded import Encoded
from counterfoil.errors import ConfigError
from counterfoil.kernels.tiles import TilePlan, plan_tiles
from counterfoil.matchers.base import Matcher
from counterfoil.matchers.joined import compiles_here, joined_tile


@dataclass(frozen=True)
class WordParts:
    """What each word of one pair contributes, [W]; ``weights`` [W, R] say where it looked.

    Where ``additive``, positive + negative summed over the words is the score exactly.
    """

    positive: Tensor
    negative: Tensor
    weights: Tensor
    additive: bool


class LocalMatcher(Matcher):
    """Scores from the fragments of both sides, tile by tile.

    A subclass implements `tile`: all pairs of a few images with a few texts, padding masked. Texts
    are taken in order of length, so that a tile has little padding, and tiles are sized from the
    memory at hand. With gradients and more than one tile, a tile is recomputed in the backward pass
    instead of kept.
    """

    needs = "fragments"
    floats_per_cell = 8

    compiles = False
    """Whether `tile` is many small operations, which a compiler can join (`joined`)."""

    large_job = False
    """Set while the pairs of a large job are scored part by part (`fused_pairs.MANY`)."""

    @property
    def cuts_images(self) -> bool:
        """False where every tile must hold all images, on all processes at the same time."""
        return True

    def cells_per_pair(self, words: int, regions: int) -> int:
        """Cells of one pair: word-region similarities, and what a method holds besides."""
        return words * regions

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [I, T] of a tile; fragments are real where the masks say so."""
        raise NotImplementedError

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        """Contribution of each word of one pair; None where the method has no such parts."""
        return None

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        lengths = texts.mask.sum(1)
        order = lengths.argsort(descending=True, stable=True)
        ordered = texts[order]
        longest = max(1, int(lengths.max())) if len(texts) else 1
        regions = max(1, int(images.mask.sum(1).max())) if len(images) else 1
        images = images.trim_to(regions)
        device = images.mask.device
        cells = self.cells_per_pair(longest, regions)
        plan = plan_tiles(len(images), len(texts), cells, self.floats_per_cell, device)
        if not self.cuts_images:
            plan = TilePlan(max(1, len(images)), min(gather_counts(plan.columns, device)))
        whole = plan.rows >= len(images) and plan.columns >= len(texts)
        recompute = torch.is_grad_enabled() and not whole
        columns: list[Tensor] = []
        for left in range(0, len(texts), plan.columns):
            block = ordered[left : left + plan.columns]
            block = block.trim_to(max(1, int(block.mask.sum(1).max())))
            rows = [
                self._tile(images[top : top + plan.rows], block, recompute)
                for top in range(0, len(images), plan.rows)
            ]
            columns.append(torch.cat(rows))
        return torch.cat(columns, dim=1)[:, order.argsort()]

    def _tile(self, images: Encoded, texts: Encoded, recompute: bool) -> Tensor:
        if not recompute:
            joins = self.compiles and self.large_job and not torch.is_grad_enabled()
            if joins and compiles_here(images.mask.device):
                return joined_tile(self, images, texts)
            return self.tile(images, texts)

        def run(image_fragments: Tensor, text_fragments: Tensor) -> Tensor:
            return self.tile(
                replace(images, fragments=image_fragments), replace(texts, fragments=text_fragments)
            )

        scores: Tensor = checkpoint(
            run, fragments(images), fragments(texts), use_reentrant=False, preserve_rng_state=False
        )
        return scores


def fragments(encoded: Encoded) -> Tensor:
    if encoded.fragments is None:
        raise ConfigError("this matcher compares fragments, but only pooled vectors were kept")
    return encoded.fragments
