"""`SimilarityMatcher`: matchers that read nothing of a pair but its word-region similarities."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import gram
from counterfoil.kernels.similarity_tiles import Block, Score, Tile, score_block
from counterfoil.matchers.local import LocalMatcher, fragments

KEPT_CELLS = 1 << 26
"""Similarities kept for the backward pass; a larger grid is recomputed block by block."""

BLOCK_CELLS = 1 << 24
"""Similarities of one matrix product where they are not kept."""


class SimilarityMatcher(LocalMatcher):
    """Scores of all pairs from one matrix product and cache-sized tiles.

    A subclass implements `score` of a `Tile`: similarities of asking fragments with answering ones,
    and the answering side's Gram matrix. The asking side is packed: no padding, no mask.
    """

    def score(self, tile: Tile) -> Tensor:
        """Scores [Q, C] of a tile."""
        raise NotImplementedError

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        return self.directed(texts, images, self.score).T

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        return self.forward(images, texts)

    def directed(self, asking: Encoded, answering: Encoded, score: Score) -> Tensor:
        """Scores [Q, C], in which fragments of ``asking`` attend to those of ``answering``."""
        lengths = asking.mask.sum(1)
        order = lengths.argsort(stable=True)
        ordered = asking[order]
        sizes = lengths[order].tolist()
        packed = fragments(ordered)[ordered.mask]  # [ΣN, D]
        v = fragments(answering)
        full = bool(answering.mask.all())
        answers = None if full else answering.mask
        cells = max(1, len(packed)) * max(1, answering.mask.numel())
        if torch.is_grad_enabled() and cells <= KEPT_CELLS:
            scores = _block(score, packed, v, gram(v), answers, sizes)
        else:
            scores = self._in_blocks(score, packed, v, answers, sizes)
        return scores[order.argsort()]

    def _in_blocks(
        self, score: Score, packed: Tensor, v: Tensor, answers: Tensor | None, sizes: list[int]
    ) -> Tensor:
        """The same, a few asking items at a time; with gradients each block is recomputed."""
        grams = gram(v)
        rows: list[Tensor] = []
        item = start = 0
        limit = max(1, BLOCK_CELLS // max(1, v.shape[0] * v.shape[1]))
        while item < len(sizes):
            stop, count = item, 0
            while stop < len(sizes) and (stop == item or count + sizes[stop] <= limit):
                count += sizes[stop]
                stop += 1
            part = packed[start : start + count]
            if torch.is_grad_enabled():
                scores: Tensor = checkpoint(
                    _block, score, part, v, grams, answers, sizes[item:stop], use_reentrant=False
                )
            else:
                scores = _block(score, part, v, grams, answers, sizes[item:stop])
            rows.append(scores)
            item, start = stop, start + count
        return torch.cat(rows) if rows else v.new_zeros(0, len(v))


def one_pair(asking: Encoded, answering: Encoded) -> tuple[Tile, Callable[[Tensor], Tensor]]:
    """One pair as a tile without padding, and what puts its values back at the padded places."""
    u = fragments(asking)[0][asking.mask[0]]
    v = fragments(answering)[:1][:, answering.mask[0]]
    tile = Tile((u @ v[0].T)[None, :, None], u[None], gram(v), None)

    def place(values: Tensor) -> Tensor:
        full = values.new_zeros(asking.mask.shape[1], *values.shape[1:])
        full[asking.mask[0]] = values
        if values.ndim == 1:
            return full
        wide = values.new_zeros(len(full), answering.mask.shape[1])
        wide[:, answering.mask[0]] = full
        return wide

    return tile, place


def _block(
    score: Score, packed: Tensor, v: Tensor, grams: Tensor, answers: Tensor | None, sizes: list[int]
) -> Tensor:
    sims = (packed @ v.flatten(0, 1).T).view(len(packed), *v.shape[:2])
    return score_block(score, Block(sims, packed, grams, answers, sizes))
