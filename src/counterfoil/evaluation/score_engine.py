"""Every image with every text: the one way in which all pairs are scored.

A plan cuts the pairs into tiles without padding; tiles are scored one after the other, and on a GPU
a tile travels to the host while the next is scored. What becomes of them is up to the caller: a
matrix in memory, one on disk (`score_file`), or only the best of each row and column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.evaluation.best import PAIRS, BestBothWays
from counterfoil.evaluation.score_plan import ScorePlan, ScoreTile, extents, plan_scores
from counterfoil.kernels.fused_pairs import MANY
from counterfoil.matchers import Matcher
from counterfoil.matchers.similarity import SimilarityMatcher
from counterfoil.progress import Progress, Silent

LABEL = "scoring"

LONGEST = 255.0
"""Of fragments in half precision: inner products of longer ones may be beyond its range."""


@dataclass(frozen=True)
class BestPairs:
    """The best texts of each image [I, k] and images of each text [T, k], with their scores.

    Best first; among equal scores the lower index first.
    """

    texts: Tensor
    text_scores: Tensor
    images: Tensor
    image_scores: Tensor


def scored_tiles(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    plan: ScorePlan,
    done: Collection[int] = (),
) -> Iterator[tuple[ScoreTile, Tensor]]:
    """Tiles that are not ``done``, each with its scores in float32 on the matcher's device."""
    rows, shown = None, images
    images, texts = for_kernels(matcher, images), for_kernels(matcher, texts)
    large = len(images) * int(texts.mask.sum()) * images.mask.shape[1] >= MANY
    for tile in plan.tiles:
        if tile.number in done:
            continue
        if tile.rows != rows:
            rows, shown = tile.rows, _trimmed(images[tile.rows])
        said = _trimmed(texts[plan.columns(tile)])
        with torch.inference_mode(), _as_part(matcher, large):
            block = matcher(shown, said).float()
        yield tile, block


def for_kernels(matcher: Matcher, encoded: Encoded) -> Encoded:
    """Fragments in half precision where fused kernels compare them, else as they are."""
    if encoded.fragments is None or encoded.fragments.dtype != torch.float32:
        return encoded
    with torch.inference_mode():
        if not isinstance(matcher, SimilarityMatcher) or not matcher.halved(encoded.mask.device):
            return encoded
        if not encoded.fragments.numel() or encoded.fragments.norm(dim=-1).max() > LONGEST:
            return encoded
        return replace(encoded, fragments=encoded.fragments.half())


@contextmanager
def _as_part(matcher: Matcher, large: bool) -> Iterator[None]:
    """Score a tile as a part of a job of this size."""
    if not isinstance(matcher, SimilarityMatcher):
        yield
        return
    matcher.large_job = large
    try:
        yield
    finally:
        vars(matcher).pop("large_job", None)  # no trace: what a matcher holds is part of its mark


def on_host(tiles: Iterator[tuple[ScoreTile, Tensor]]) -> Iterator[tuple[ScoreTile, Tensor]]:
    """The same tiles in the host's memory; each travels while its successor is scored."""
    waiting: tuple[ScoreTile, _Arrival] | None = None
    for tile, block in tiles:
        coming = tile, _Arrival(block)
        if waiting is not None:
            yield waiting[0], waiting[1].wait()
        waiting = coming
    if waiting is not None:
        yield waiting[0], waiting[1].wait()


def fill(out: Tensor, plan: ScorePlan, tile: ScoreTile, block: Tensor) -> None:
    """Put a tile where it belongs in a matrix [n_images, n_texts] of the host."""
    out[tile.rows].index_copy_(1, plan.columns_on_host(tile), block.to(out.dtype))


@torch.inference_mode()
def score_matrix(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    progress: Progress | None = None,
    plan: ScorePlan | None = None,
) -> Tensor:
    """Scores [n_images, n_texts] in float32 on the CPU."""
    progress, plan = progress or Silent(), plan or plan_scores(images, texts)
    scores = torch.empty(len(images), len(texts))
    tiles = on_host(scored_tiles(matcher, images, texts, plan))
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles)):
        fill(scores, plan, tile, block)
    return scores


@torch.inference_mode()
def best_pairs(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    k: int,
    progress: Progress | None = None,
    plan: ScorePlan | None = None,
) -> BestPairs:
    """The best ``k`` of both directions in one pass; the matrix itself never exists."""
    if k < 1:
        raise DataError(f"k must be at least 1, got {k}")
    progress, plan = progress or Silent(), plan or plan_scores(images, texts, pairs=PAIRS)
    best = BestBothWays(len(images), len(texts), k, images.mask.device)
    tiles = scored_tiles(matcher, images, texts, plan)
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles)):
        if block.isnan().any():
            raise DataError(
                "the model scores some pairs as not a number: they cannot be ranked; look for a "
                "division by a zero norm"
            )
        best.offer(tile.rows, plan.columns(tile), block)
    (texts_of, text_scores), (images_of, image_scores) = best.images(), best.texts()
    widths = min(k, len(texts)), min(k, len(images))
    return BestPairs(
        texts_of[:, : widths[0]].cpu(),
        text_scores[:, : widths[0]].cpu(),
        images_of[:, : widths[1]].cpu(),
        image_scores[:, : widths[1]].cpu(),
    )


def _trimmed(encoded: Encoded) -> Encoded:
    """Without the padding that all items share."""
    if not len(encoded) or not encoded.mask.shape[1]:
        return encoded
    return encoded.trim_to(max(1, int(extents(encoded).max())))


class _Arrival:
    """A block on its way to the host: by a stream of its own into pinned memory, from a GPU."""

    def __init__(self, block: Tensor) -> None:
        self.host, self.event = block, None
        if not block.is_cuda:
            return
        stream = _side_stream(block.device)
        stream.wait_stream(torch.cuda.current_stream(block.device))
        self.host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            self.host.copy_(block, non_blocking=True)
            block.record_stream(stream)
            self.event = stream.record_event()

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device: a new one for every tile would never be given back."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
