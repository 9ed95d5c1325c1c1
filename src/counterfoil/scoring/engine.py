"""Score every image with every text, tile by tile.

A plan splits the pairs into tiles with little padding. On a GPU, a tile is copied to the host while
the next one is scored; on a CPU, threads score tiles side by side. Callers keep the whole matrix,
or only the best of each row and column.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.device import free_memory
from counterfoil.core.tensors.transfer import Arrival, to_cpu
from counterfoil.encoders import Encoded
from counterfoil.kernels.spec import ScoringJob, without_kernels
from counterfoil.kernels.triton.training import trainable
from counterfoil.matchers import Matcher
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.ensemble import EnsembleMatcher
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.models.model import Model
from counterfoil.scoring.plan import (
    BYTES_PER_CELL,
    FREE_SHARE,
    ScorePlan,
    ScoreTile,
    plan_for_kernels,
    plan_scores,
)

LABEL = "scoring"

MAX_SCORING_THREADS = 8
"""Each has a tile in memory."""

MAX_HALF_NORM = 255.0
"""Largest norm of fragments in float16; inner products of longer ones may overflow."""


def scored_tiles(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    plan: ScorePlan,
) -> Iterator[tuple[ScoreTile, Tensor]]:
    """All tiles, each with its float32 scores on the matcher's device."""
    images, texts = for_kernels(matcher, images), for_kernels(matcher, texts)
    job = ScoringJob(len(images) * int(texts.mask.sum()) * images.mask.shape[1])
    ends = texts.extents()

    def score(tile: ScoreTile) -> Tensor:
        with torch.inference_mode():  # also in a thread, which does not inherit it
            columns = plan.columns(tile)
            block_images = _trimmed(images[tile.rows])
            block_texts = _trimmed(texts, ends[columns])[columns]  # trimmed first, to copy less
            return matcher.score_block(block_images, block_texts, job).float()

    workers = _threads_for(plan, images.mask.device)
    if workers > 1:
        yield from _in_threads(score, plan.tiles, workers)
        return
    for tile in plan.tiles:
        yield tile, score(tile)


def _threads_for(plan: ScorePlan, device: torch.device) -> int:
    """Number of tiles to score at once: with whole tiles, cores wait less for each other.

    One on a GPU; under autocast, which threads do not inherit; for few tiles, which would leave
    cores idle; and outside of the main thread, because PyTorch's number of threads is one for the
    process: threads of a service that begin meanwhile would keep the number of these.
    """
    if device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return 1
    if threading.current_thread() is not threading.main_thread():
        return 1
    in_memory = int(free_memory(device) * FREE_SHARE) // (BYTES_PER_CELL * plan.cells)
    workers = min(torch.get_num_threads(), MAX_SCORING_THREADS, in_memory)
    return workers if len(plan.tiles) >= 2 * workers else 1


def _in_threads(
    score: Callable[[ScoreTile], Tensor], tiles: Sequence[ScoreTile], workers: int
) -> Iterator[tuple[ScoreTile, Tensor]]:
    """The tiles in order, with scores by ``workers`` threads that share the cores."""
    threads, waiting = torch.get_num_threads(), deque[tuple[ScoreTile, Future[Tensor]]]()
    share = (max(1, threads // workers),)
    try:
        with ThreadPoolExecutor(workers, "scoring", torch.set_num_threads, share) as pool:
            try:
                for tile in tiles:
                    waiting.append((tile, pool.submit(score, tile)))
                    if len(waiting) > workers:
                        done, scores = waiting.popleft()
                        yield done, scores.result()
                while waiting:
                    done, scores = waiting.popleft()
                    yield done, scores.result()
            finally:
                for _, scores in waiting:
                    scores.cancel()
    finally:  # after the last thread has ended, which may set the number of the process
        torch.set_num_threads(threads)


def for_kernels(matcher: Matcher, encoded: Encoded) -> Encoded:
    """Fragments in float16 if fused kernels compare them, else unchanged.

    A cross-encoder gets bfloat16, and so runs all of its layers in it, if its GPU is faster so.
    """
    if encoded.fragments is None or encoded.fragments.dtype != torch.float32:
        return encoded
    if isinstance(matcher, CrossEncoder) and matcher.rounds(encoded.mask.device):
        return replace(encoded, fragments=encoded.fragments.bfloat16())
    with torch.inference_mode():
        if not isinstance(matcher, CrossAttentionMatcher) or not matcher.accepts_half(
            encoded.mask.device
        ):
            return encoded
        if not encoded.fragments.numel() or encoded.fragments.norm(dim=-1).max() > MAX_HALF_NORM:
            return encoded
        return replace(encoded, fragments=encoded.fragments.half())


def on_cpu(tiles: Iterator[tuple[ScoreTile, Tensor]]) -> Iterator[tuple[ScoreTile, Tensor]]:
    """The same tiles in host memory; each is copied while the next one is scored."""
    previous: tuple[ScoreTile, Arrival] | None = None
    for tile, block in tiles:
        current = tile, Arrival(block)
        if previous is not None:
            yield previous[0], previous[1].wait()
        previous = current
    if previous is not None:
        yield previous[0], previous[1].wait()


@torch.inference_mode()
def score_matrix(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    progress: Progress | None = None,
    plan: ScorePlan | None = None,
) -> Tensor:
    """Scores [n_images, n_texts] in float32 on the CPU."""
    if by_kernels(matcher, images) and _fits(images, texts):
        return to_cpu(score_on_device(matcher, images, texts, progress, plan))
    progress, plan = progress or Silent(), plan or plan_scores(images, texts)
    scores = torch.empty(len(images), len(texts))
    tiles = on_cpu(scored_tiles(matcher, images, texts, plan))
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles)):
        scores[tile.rows].index_copy_(1, plan.columns_on_cpu(tile), block)
    return scores


@torch.inference_mode()
def score_on_device(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    progress: Progress | None = None,
    plan: ScorePlan | None = None,
) -> Tensor:
    """Scores [n_images, n_texts] in float32 on the device of the inputs."""
    progress, device = progress or Silent(), images.mask.device
    # Allocated before the plan, which depends on the free memory.
    scores = torch.empty(len(images), len(texts), dtype=torch.float32, device=device)
    if plan is None and by_kernels(matcher, images):
        width = images.fragments.shape[-1] if images.fragments is not None else 1
        plan = plan_for_kernels(images, texts, width)
    plan = plan or plan_scores(images, texts)
    tiles = scored_tiles(matcher, images, texts, plan)
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles)):
        scores[tile.rows].index_copy_(1, plan.columns(tile), block)
    return scores


def by_kernels(matcher: Matcher, encoded: Encoded) -> bool:
    """Whether fused kernels score these inputs."""
    with torch.inference_mode():
        device = encoded.mask.device
        return isinstance(matcher, CrossAttentionMatcher) and matcher.accepts_half(device)


def _fits(images: Encoded, texts: Encoded) -> bool:
    bytes_needed = 4 * len(images) * len(texts)
    return bytes_needed <= FREE_SHARE * free_memory(images.mask.device)


def _trimmed(encoded: Encoded, ends: Tensor | None = None) -> Encoded:
    """Trim the padding that all items share; ``ends`` are the lengths of the items to keep."""
    if not len(encoded) or not encoded.mask.shape[1]:
        return encoded
    ends = encoded.extents() if ends is None else ends
    return encoded.trim_to(max(1, int(ends.max())))


def fallback(model: Model, training: bool = False) -> str | None:
    """Why PyTorch scores pairs that a fused kernel could score, in one line.

    None if the kernels do, or if the model's matcher has none. In ``training``, the kernel also
    needs a backward pass.
    """
    matcher = model.matcher
    first = matcher.members[0] if isinstance(matcher, EnsembleMatcher) else matcher
    if not isinstance(first, CrossAttentionMatcher) or not first.kernel_specs():
        return None
    line = without_kernels(model.device)
    if line is None and training and not all(trainable(spec) for spec in first.kernel_specs()):
        return "training by PyTorch: the fused kernel of this matcher has no backward pass"
    return line
