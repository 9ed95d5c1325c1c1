"""`SimilarityMatcher`: matchers that read nothing of a pair but its word-region similarities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import gram
from counterfoil.kernels.blocks import Score, Sides, Tile
from counterfoil.kernels.fused import Recipe, usable
from counterfoil.kernels.fused_pairs import fused_pairs
from counterfoil.kernels.host_attention import host_attention
from counterfoil.kernels.host_sides import Kept
from counterfoil.kernels.similarity_tiles import score_sides
from counterfoil.matchers.local import LocalMatcher, fragments
from counterfoil.matchers.precision import single_fragments, single_precision

KEPT_CELLS = 1 << 26
"""Similarities kept for the backward pass; a larger grid is recomputed block by block."""

BLOCK_CELLS = 1 << 24
"""Similarities of one matrix product where they are not kept."""


class SimilarityMatcher(LocalMatcher):
    """Scores of all pairs from one matrix product and cache-sized tiles.

    A subclass implements `score` of a `Tile`: similarities of asking fragments with answering ones,
    and the answering side's Gram matrix. The asking side is packed: no padding, no mask. Where it
    has `recipes`, a GPU computes the same by a fused kernel.
    """

    kept: Kept | None = None
    """Set while the pairs of a job are scored part by part, the same for the same images."""

    wants_kin = False
    """Whether `score` reads the inner products of the asking fragments with each other."""

    def score(self, tile: Tile) -> Tensor:
        """Scores [Q, C] of a tile."""
        raise NotImplementedError

    def recipes(self) -> tuple[Recipe, ...]:
        """What fused kernels have to compute and add up; none: there is no kernel for it."""
        return ()

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        pair = (fragments(images), images.mask), (fragments(texts), texts.mask)
        fused = fused_pairs(self.recipes(), *pair, large=self.large_job)
        if fused is not None:
            return fused
        with single_precision(images.mask.device) as was_mixed:
            if was_mixed:
                images, texts = single_fragments(images), single_fragments(texts)
            return self._unfused(images, texts)

    def _unfused(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores without a fused kernel: by compiled functions of the host, or by PyTorch."""
        pair = (fragments(images), images.mask), (fragments(texts), texts.mask)
        on_host = host_attention(self.recipes(), *pair, kept=self.kept)
        if on_host is not None:
            return on_host
        if self.halved(images.mask.device):
            images, texts = _no_halves(images), _no_halves(texts)
        return self.eager(images, texts)

    def halved(self, device: torch.device) -> bool:
        """Whether fragments may be given in half precision where no gradient is wanted."""
        kernels = bool(self.recipes()) and usable(device, torch.float16)
        return kernels and not torch.is_grad_enabled()

    def eager(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [I, T] by PyTorch, on any device and in any precision."""
        return self.directed(texts, images, self.score).T

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        return self.forward(images, texts)

    def directed(self, asking: Encoded, answering: Encoded, score: Score) -> Tensor:
        """Scores [Q, C], in which fragments of ``asking`` attend to those of ``answering``."""
        order = asking.mask.sum(1).argsort(stable=True)
        sides = both_sides(asking[order], answering, self.wants_kin)
        cells = max(1, len(sides.packed)) * max(1, answering.mask.numel())
        if torch.is_grad_enabled() and cells <= KEPT_CELLS:
            scores = score_sides(score, sides)
        else:
            scores = torch.cat([*_in_blocks(score, sides)])
        return scores[order.argsort()]


def _no_halves(encoded: Encoded) -> Encoded:
    """In single precision what is in half; double precision stays as it is."""
    u = fragments(encoded)
    return replace(encoded, fragments=u.float()) if u.element_size() < 4 else encoded


def both_sides(asking: Encoded, answering: Encoded, wants_kin: bool) -> Sides:
    """What pairs of asking items, sorted by length, and answering items are scored from."""
    u, v = fragments(asking), fragments(answering)
    rows = asking.mask.flatten().nonzero()[:, 0]
    packed = u.flatten(0, 1).index_select(0, rows)  # its backward is faster than a mask's
    answers = None if bool(answering.mask.all()) else answering.mask
    kin = gram(_left_aligned(u, asking.mask)) if wants_kin else None
    sizes = asking.mask.sum(1).tolist()
    return Sides(packed, packed.norm(dim=-1), kin, v, gram(v), answers, sizes)


def _some(sides: Sides, items: slice, rows: slice) -> Sides:
    return replace(
        sides,
        packed=sides.packed[rows],
        norms=sides.norms[rows],
        kin=sides.kin[items] if sides.kin is not None else None,
        lengths=sides.lengths[items],
    )


def _left_aligned(u: Tensor, mask: Tensor) -> Tensor:
    """Fragments with the real ones first, so that an item of length n has them at 0 … n−1."""
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    return u.gather(1, order[..., None].expand_as(u))


def _in_blocks(score: Score, sides: Sides) -> Iterator[Tensor]:
    """A few asking items at a time; with gradients each block is recomputed in the backward."""
    limit = max(1, BLOCK_CELLS // max(1, sides.v.shape[0] * sides.v.shape[1]))
    item = start = 0
    while item < len(sides.lengths):
        stop, count = item, 0
        while stop < len(sides.lengths) and (stop == item or count + sides.lengths[stop] <= limit):
            count += sides.lengths[stop]
            stop += 1
        part = _some(sides, slice(item, stop), slice(start, start + count))
        if torch.is_grad_enabled():
            yield checkpoint(score_sides, score, part, use_reentrant=False)
        else:
            yield score_sides(score, part)
        item, start = stop, start + count
    if not sides.lengths:
        yield sides.v.new_zeros(0, len(sides.v))


def one_pair(asking: Encoded, answering: Encoded) -> tuple[Tile, Callable[[Tensor], Tensor]]:
    """One pair as a tile without padding, and what puts its values back at the padded places."""
    u = fragments(asking)[0][asking.mask[0]]
    v = fragments(answering)[:1][:, answering.mask[0]]
    tile = Tile((u @ v[0].T)[None, :, None], u.norm(dim=-1)[None], gram(v), gram(u[None]), None)

    def place(values: Tensor) -> Tensor:
        full = values.new_zeros(asking.mask.shape[1], *values.shape[1:])
        full[asking.mask[0]] = values
        if values.ndim == 1:
            return full
        wide = values.new_zeros(len(full), answering.mask.shape[1])
        wide[:, answering.mask[0]] = full
        return wide

    return tile, place
