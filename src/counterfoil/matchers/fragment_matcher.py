"""Base classes of matchers that compare words with regions.

`FragmentMatcher` scores tiles of padded pairs. `CrossAttentionMatcher` is for methods that read
only the word-region similarities of a pair: one matrix product, then packed tiles in PyTorch or a
fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterfoil.core.distributed import gather_counts
from counterfoil.core.errors import ConfigError
from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.encoders.encoded import HALVES, Encoded
from counterfoil.kernels.attention import Score, Sides, Tile, gram
from counterfoil.kernels.dispatch import try_fused_scores
from counterfoil.kernels.spec import KernelSpec, ScoringJob, usable
from counterfoil.kernels.tiled import TilePlan, plan_tiles, score_sides, tile_cells
from counterfoil.matchers.base import Matcher

CACHED_CELLS = 1 << 26
"""Most similarities stored for the backward pass; a larger grid is recomputed block by block."""

BLOCK_CELLS = 1 << 24
"""Similarities of one matrix product if they are not stored."""

GROUPS, GPU_GROUPS, SMALLEST_GROUP = 4, 2, 16
"""Groups of texts of similar length that a block is scored in, to save padding (more if memory is
short), and the fewest texts of a group.
"""
MIXED_TRAINING_GROUPS = 1
"""The same for a training step in mixed precision: more groups are more operations, which the host
starts more slowly than an H200 runs them."""

ALIGNED = 8
"""Keys per item on a GPU are a multiple of it: rows of similarities and of attention weights then
start at multiples of 16 bytes also in half precision. Other products are several times slower."""

COMPILE_BACKEND = "inductor"
_compiled: dict[tuple[type, str], Callable[..., Tensor]] = {}

_uncompilable: set[type] = set()
"""Matcher classes that `torch.compile` failed on; they run uncompiled."""


# Final scores are in single precision, even if a run is in mixed precision. bfloat16 has 8
# significant bits: two scores near 1 differ by 0.004 or not at all. Pairs would tie at the top of
# a ranking, and a model with nearly equal vectors could not learn to separate them.
@contextmanager
def single_precision(device: torch.device) -> Iterator[bool]:
    """Disable autocast; yields whether it was enabled."""
    if not torch.is_autocast_enabled(device.type):
        yield False
        return
    with torch.autocast(device.type, enabled=False):
        yield True


def single(x: Tensor) -> Tensor:
    """Half precision as single; other precisions are unchanged."""
    return x.float() if x.dtype in HALVES else x


def single_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer in single precision, even if its weights are in half."""
    bias = None if layer.bias is None else single(layer.bias)
    return nn.functional.linear(single(x), single(layer.weight), bias)


def single_fragments(encoded: Encoded) -> Encoded:
    """A copy with fragments and pooled vectors in single precision."""
    fragments, pooled = encoded.fragments, encoded.pooled
    return replace(
        encoded,
        fragments=None if fragments is None else single(fragments),
        pooled=None if pooled is None else single(pooled),
    )


@dataclass(frozen=True)
class WordParts:
    """Contributions [W] of each word of one pair, and its attention ``weights`` [W, R].

    If ``additive``, the sum of positive + negative over the words equals the score.
    """

    positive: Tensor
    negative: Tensor
    weights: Tensor
    additive: bool

    @classmethod
    def from_effects(
        cls, effects: Tensor, weights: Tensor, to_padded: Callable[[Tensor], Tensor]
    ) -> WordParts:
        """Additive parts from the signed effects of the real words."""
        positive, negative = effects.clamp(min=0), effects.clamp(max=0)
        return cls(to_padded(positive), to_padded(negative), to_padded(weights), additive=True)


class FragmentMatcher(Matcher):
    """Scores from the fragments of both sides, tile by tile.

    A subclass implements `tile`: all pairs of a few images with a few texts, padding masked. Texts
    are sorted by length, so that a tile has little padding. Those of equal length stay in one tile,
    as far as memory allows, so that equal texts have equal scores. With gradients, the tiles of a
    block that does not fit into memory are recomputed in the backward pass.
    """

    needs = "fragments"
    floats_per_cell = 8

    compiles = False
    """Whether `tile` is many small operations, which `torch.compile` can fuse on a GPU."""

    @property
    def cuts_images(self) -> bool:
        """False if every tile must hold all images, on all processes at the same time."""
        return True

    def cells_per_pair(self, words: int, regions: int) -> int:
        """Memory cells per pair: its word-region similarities, plus other intermediate values."""
        return words * regions

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [I, T] of a tile."""
        raise NotImplementedError

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        """Contribution of each word of one pair; None if the method has no such parts."""
        return None

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        if is_exporting():
            return self.tile(images, texts)
        device = images.mask.device
        lengths = _extents(texts)
        order = np.argsort(-lengths, kind="stable")
        lengths, ordered = lengths[order], texts[torch.from_numpy(order).to(device)]
        regions = max(1, int(_extents(images).max(initial=0)))
        images = images.trim_to(regions)
        plan = self._plan(len(images), lengths, regions, device)
        whole = plan.rows >= len(images) and plan.columns >= len(texts)
        if not len(images) or not len(texts):  # after the plan, which processes agree on together
            return fragments(texts).new_zeros(len(images), len(texts))
        score = self._tile_scorer(job, device, recompute=not whole)
        columns: list[Tensor] = []
        for left, right in _length_groups(lengths, plan.columns, _groups(device)):
            block = ordered[left:right].trim_to(max(1, int(lengths[left])))
            tops = range(0, len(images), plan.rows)
            columns.append(torch.cat([score(images[top : top + plan.rows], block) for top in tops]))
        return torch.cat(columns, dim=1)[:, torch.from_numpy(np.argsort(order)).to(device)]

    def _plan(
        self, images: int, lengths: NDArray[np.int64], regions: int, device: torch.device
    ) -> TilePlan:
        """Tiles that fit into memory; if those of all groups of texts do at once, all in one."""
        cells = [
            (right - left) * self.cells_per_pair(max(1, int(lengths[left])), regions)
            for left, right in _length_groups(lengths, max(1, len(lengths)), _groups(device))
        ]
        if images * sum(cells) <= tile_cells(self.floats_per_cell, device):
            plan = TilePlan(max(1, images), max(1, len(lengths)))
        else:
            longest = self.cells_per_pair(max(1, int(lengths.max(initial=0))), regions)
            plan = plan_tiles(images, len(lengths), longest, self.floats_per_cell, device)
        if not self.cuts_images:
            plan = TilePlan(max(1, images), min(gather_counts(plan.columns, device)))
        return plan

    def _tile_scorer(
        self, job: ScoringJob, device: torch.device, recompute: bool
    ) -> Callable[[Encoded, Encoded], Tensor]:
        """`tile` itself, compiled, or recomputed in the backward pass."""
        if torch.is_grad_enabled():
            return self._recomputed_tile if recompute else self.tile
        if self.compiles and job.large and can_compile(device):
            return partial(compiled_tile, self)
        return self.tile

    def _recomputed_tile(self, images: Encoded, texts: Encoded) -> Tensor:
        def run(image_fragments: Tensor, text_fragments: Tensor) -> Tensor:
            return self.tile(
                replace(images, fragments=image_fragments), replace(texts, fragments=text_fragments)
            )

        scores: Tensor = checkpoint(
            run, fragments(images), fragments(texts), use_reentrant=False, preserve_rng_state=False
        )
        return scores


def _groups(device: torch.device) -> int:
    if device.type != "cuda":
        return GROUPS
    mixed = torch.is_grad_enabled() and torch.is_autocast_enabled(device.type)
    return MIXED_TRAINING_GROUPS if mixed else GPU_GROUPS


def _length_groups(
    lengths: NDArray[np.int64], max_texts: int, groups: int
) -> Iterator[tuple[int, int]]:
    """About ``groups`` ranges of texts, sorted by descending length, that are scored together.

    A range ends where the length changes, unless it would have more than ``max_texts`` texts.
    """
    size = max(SMALLEST_GROUP, -(-len(lengths) // groups))
    left = 0
    while left < len(lengths):
        last = min(left + size, len(lengths)) - 1
        right = min(int(np.searchsorted(-lengths, -lengths[last], side="right")), left + max_texts)
        yield left, right
        left = right


def _extents(items: Encoded) -> NDArray[np.int64]:
    """Index after the last real fragment of each item; padding may also precede it."""
    mask = host_mask(items.mask)
    ends = np.arange(1, mask.shape[1] + 1)
    return (mask * ends).max(1, initial=0)


def aligned(keys: Encoded) -> Encoded:
    """Keys with padding up to a multiple of `ALIGNED`, on a GPU."""
    length = keys.mask.shape[1]
    return keys.pad_to(length + -length % ALIGNED) if keys.mask.is_cuda else keys


def can_compile(device: torch.device) -> bool:
    """Whether compiled code (Triton, on a GPU) can run on a device."""
    return usable(device, torch.float32)


def compiled_tile(matcher: FragmentMatcher, images: Encoded, texts: Encoded) -> Tensor:
    """`FragmentMatcher.tile`, compiled for tiles of any size; uncompiled if that fails.

    Compiling takes about a minute per class and process, so only large jobs use it.
    """
    kind = type(matcher)
    if kind not in _uncompilable:
        try:
            return _compile_tile(kind, COMPILE_BACKEND)(matcher, images, texts)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:  # the errors of PyTorch's compiler are subclasses
            _uncompilable.add(kind)
    return matcher.tile(images, texts)


def _compile_tile(kind: type[FragmentMatcher], backend: str) -> Callable[..., Tensor]:
    if (kind, backend) not in _compiled:
        _compiled[kind, backend] = torch.compile(kind.tile, dynamic=True, backend=backend)
    return _compiled[kind, backend]


def fragments(encoded: Encoded) -> Tensor:
    """The fragments [n, length, D]; an error if there are none."""
    if encoded.fragments is None:
        raise ConfigError("this matcher compares fragments, but only pooled vectors were kept")
    return encoded.fragments


class CrossAttentionMatcher(FragmentMatcher):
    """Scores of all pairs from one matrix product and cache-sized tiles.

    A subclass implements `score` of a `Tile`: similarities of query fragments with key fragments,
    and the Gram matrix of the keys. Queries are packed: no padding, no mask. If the subclass has
    `kernel_specs`, a GPU computes the same scores by a fused kernel.

    An exported graph cannot depend on lengths, so it scores one padded tile (`padded_tile`).
    """

    needs_query_gram = False
    """Whether `score` reads the inner products of an item's query fragments with each other."""

    def score(self, tile: Tile) -> Tensor:
        """Scores [Q, C] of a tile."""
        raise NotImplementedError

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        """Fused kernels whose scores are summed; empty if there is no kernel for this matcher."""
        return ()

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        if is_exporting():
            return self.torch_scores(images, texts)
        pair = (fragments(images), images.mask), (fragments(texts), texts.mask)
        fused = try_fused_scores(self.kernel_specs(), *pair, job)
        if fused is not None:
            return fused
        with single_precision(images.mask.device):
            return self.torch_scores(single_fragments(images), single_fragments(texts))

    def accepts_half(self, device: torch.device) -> bool:
        """Whether fragments may be in half precision when no gradient is needed."""
        kernels = bool(self.kernel_specs()) and usable(device, torch.float16)
        return kernels and not torch.is_grad_enabled()

    def torch_scores(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [I, T] by PyTorch, on any device."""
        return self.attend(texts, images, self.score).T

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        return self.score_block(images, texts, ScoringJob())

    def attend(self, queries: Encoded, keys: Encoded, score: Score) -> Tensor:
        """Scores [Q, C]: fragments of ``queries`` attend to fragments of ``keys``."""
        if is_exporting():
            scores = score(padded_tile(queries, keys, self.needs_query_gram))
            return scores.masked_fill(~queries.mask.any(1, keepdim=True), 0.0)
        order = queries.mask.sum(1).argsort(stable=True)
        sides = both_sides(queries[order], keys, self.needs_query_gram)
        cells = max(1, len(sides.packed)) * max(1, keys.mask.numel())
        if torch.is_grad_enabled() and cells <= CACHED_CELLS:
            scores = score_sides(score, sides)
        else:
            scores = torch.cat([*_block_scores(score, sides)])
        return scores[order.argsort()]


def both_sides(queries: Encoded, keys: Encoded, needs_query_gram: bool) -> Sides:
    """Packed queries, sorted by length, and keys, with their norms and Gram matrices."""
    u, v = fragments(queries), fragments(keys)
    rows = queries.mask.flatten().nonzero()[:, 0]
    packed = u.flatten(0, 1).index_select(0, rows)  # faster backward pass than a boolean mask
    key_mask = None if bool(keys.mask.all()) else keys.mask
    query_gram = gram(_left_aligned(u, queries.mask)) if needs_query_gram else None
    sizes = queries.mask.sum(1).tolist()
    return Sides(packed, packed.norm(dim=-1), query_gram, v, gram(v), key_mask, sizes)


def padded_tile(queries: Encoded, keys: Encoded, needs_query_gram: bool) -> Tile:
    """All pairs as one tile, padding included: its operations depend only on shapes."""
    u = fragments(queries).masked_fill(~queries.mask[..., None], 0.0)
    v = fragments(keys)
    query_gram = gram(u) if needs_query_gram else None
    sims = torch.einsum("qnd,ckd->qnck", u, v)
    return Tile(sims, u.norm(dim=-1), gram(v), query_gram, keys.mask, queries.mask)


def _slice_queries(sides: Sides, items: slice, rows: slice) -> Sides:
    return replace(
        sides,
        packed=sides.packed[rows],
        norms=sides.norms[rows],
        query_gram=sides.query_gram[items] if sides.query_gram is not None else None,
        lengths=sides.lengths[items],
    )


def _left_aligned(u: Tensor, mask: Tensor) -> Tensor:
    """Fragments with the real ones first: those of an item of length n are at 0 … n−1."""
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    return u.gather(1, order[..., None].expand_as(u))


def _block_scores(score: Score, sides: Sides) -> Iterator[Tensor]:
    """Scores of a few query items at a time; the backward pass recomputes each block."""
    limit = max(1, BLOCK_CELLS // max(1, sides.v.shape[0] * sides.v.shape[1]))
    item = start = 0
    while item < len(sides.lengths):
        stop, count = item, 0
        while stop < len(sides.lengths) and (stop == item or count + sides.lengths[stop] <= limit):
            count += sides.lengths[stop]
            stop += 1
        block = _slice_queries(sides, slice(item, stop), slice(start, start + count))
        if torch.is_grad_enabled():
            yield checkpoint(score_sides, score, block, use_reentrant=False)
        else:
            yield score_sides(score, block)
        item, start = stop, start + count
    if not sides.lengths:
        yield sides.v.new_zeros(0, len(sides.v))


def one_pair(queries: Encoded, keys: Encoded) -> tuple[Tile, Callable[[Tensor], Tensor]]:
    """One pair as a tile without padding, and a function that pads values of its fragments."""
    u = fragments(queries)[0][queries.mask[0]]
    v = fragments(keys)[:1][:, keys.mask[0]]
    tile = Tile((u @ v[0].T)[None, :, None], u.norm(dim=-1)[None], gram(v), gram(u[None]), None)

    def to_padded(values: Tensor) -> Tensor:
        """Values [N] or [N, K] of real fragments, with zeros at the padded positions."""
        rows = values.new_zeros(queries.mask.shape[1], *values.shape[1:])
        rows[queries.mask[0]] = values
        if values.ndim == 1:
            return rows
        grid = values.new_zeros(len(rows), keys.mask.shape[1])
        grid[:, keys.mask[0]] = rows
        return grid

    return tile, to_padded
