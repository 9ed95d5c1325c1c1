"""Every image with every text: the one way in which all pairs are scored.

A plan cuts the pairs into tiles without padding; tiles are scored one after the other, and on a GPU
a tile travels to the host while the next is scored. What becomes of them is up to the caller: a
matrix in memory, one on disk (`score_file`), or only the best of each row and column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.device import free_memory
from counterfoil.core.tensors.transfer import Arrival, to_host
from counterfoil.encoders import Encoded
from counterfoil.kernels.spec import ScoringJob, without_kernels
from counterfoil.kernels.triton.training import trainable
from counterfoil.matchers import Matcher
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.ensemble import CopiedMatcher
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.models.model import Model
from counterfoil.scoring.plan import (
    FREE_SHARE,
    ScorePlan,
    ScoreTile,
    extents,
    plan_for_kernels,
    plan_scores,
)

NOBODY = -1
"""Stands at the end of a row where there are fewer candidates than were asked for."""

PAIRS = 1 << 22
"""Most pairs to offer at once: what ranks them takes several times the room of their scores."""

_LOW = (1 << 32) - 1
_EMPTY = -(1 << 63)

LABEL = "scoring"

LONGEST = 255.0
"""Of fragments in half precision: inner products of longer ones may be beyond its range."""


# A score and the index of its candidate are packed into one integer whose order is that of the
# scores and, among equal scores, of the lower index. So what is kept does not depend on the
# tiles.
class BestBothWays:
    """The best ``k`` texts of each image and images of each text, of the tiles offered so far.

    Scores are compared in float32 and must be numbers.
    """

    def __init__(self, images: int, texts: int, k: int, device: torch.device) -> None:
        self._of_image = torch.full((images, k), _EMPTY, dtype=torch.long, device=device)
        self._of_text = torch.full((texts, k), _EMPTY, dtype=torch.long, device=device)
        self._ids = torch.arange(images, device=device)

    def offer(
        self, rows: slice, columns: Tensor, scores: Tensor, left_out: Tensor | None = None
    ) -> None:
        """Scores of images ``rows`` with texts ``columns``; pairs ``left_out`` do not count."""
        columns = columns.to(self._ids.device)
        by_image = _packed(scores, columns[None, :])
        by_text = _packed(scores, self._ids[rows, None])
        if left_out is not None:
            by_image.masked_fill_(left_out, _EMPTY)
            by_text.masked_fill_(left_out, _EMPTY)
        self._of_image[rows] = _merged(self._of_image[rows], by_image)
        self._of_text[columns] = _merged(self._of_text[columns], by_text.T)

    def images(self) -> tuple[Tensor, Tensor]:
        """Texts [I, k] of each image, best first, and their scores; `NOBODY`, −∞ at the end."""
        return _unpacked(self._of_image)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Images [T, k] of each text, likewise."""
        return _unpacked(self._of_text)


def _merged(best: Tensor, new: Tensor) -> Tensor:
    k = best.shape[1]
    return torch.cat([best, new.topk(min(k, new.shape[1]), 1).values], 1).topk(k, 1).values


def _packed(scores: Tensor, candidates: Tensor) -> Tensor:
    """One integer a score: its order in the high half, the candidate counted down in the low."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: no negative zero
    return (_ordered(bits).long() << 32) + (_LOW - candidates)


def _unpacked(best: Tensor) -> tuple[Tensor, Tensor]:
    scores = _ordered((best >> 32).int()).view(torch.float32)
    empty = best == _EMPTY
    return torch.where(empty, NOBODY, _LOW - (best & _LOW)), scores.masked_fill(empty, -torch.inf)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floats to integers in the same order; twice is the way back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
    job = ScoringJob(len(images) * int(texts.mask.sum()) * images.mask.shape[1])
    ends = extents(texts)
    for tile in plan.tiles:
        if tile.number in done:
            continue
        if tile.rows != rows:
            rows, shown = tile.rows, _trimmed(images[tile.rows])
        columns = plan.columns(tile)
        said = _trimmed(texts, ends[columns])[columns]  # in this order less is copied
        with torch.inference_mode():
            block = matcher.score_block(shown, said, job).float()
        yield tile, block


def for_kernels(matcher: Matcher, encoded: Encoded) -> Encoded:
    """Fragments in half precision where fused kernels compare them, else as they are.

    Those of a cross-encoder in bfloat16, and so all of its layers, where a GPU is faster at it.
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
        if not encoded.fragments.numel() or encoded.fragments.norm(dim=-1).max() > LONGEST:
            return encoded
        return replace(encoded, fragments=encoded.fragments.half())


def on_host(tiles: Iterator[tuple[ScoreTile, Tensor]]) -> Iterator[tuple[ScoreTile, Tensor]]:
    """The same tiles in the host's memory; each travels while its successor is scored."""
    waiting: tuple[ScoreTile, Arrival] | None = None
    for tile, block in tiles:
        coming = tile, Arrival(block)
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
    if by_kernels(matcher, images) and _fits(images, texts):
        return to_host(score_on_device(matcher, images, texts, progress, plan))
    progress, plan = progress or Silent(), plan or plan_scores(images, texts)
    scores = torch.empty(len(images), len(texts))
    tiles = on_host(scored_tiles(matcher, images, texts, plan))
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles)):
        fill(scores, plan, tile, block)
    return scores


@torch.inference_mode()
def score_on_device(
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    progress: Progress | None = None,
    plan: ScorePlan | None = None,
) -> Tensor:
    """The same where the encoded sides are, with room for it."""
    progress, device = progress or Silent(), images.mask.device
    # before the plan, which shares out what memory is left
    scores = torch.empty(len(images), len(texts), dtype=torch.float32, device=device)
    if plan is None and by_kernels(matcher, images):
        plan = plan_for_kernels(images, texts, _width(images))
    plan = plan or plan_scores(images, texts)
    tiles = scored_tiles(matcher, images, texts, plan)
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles)):
        scores[tile.rows].index_copy_(1, plan.columns(tile), block)
    return scores


def by_kernels(matcher: Matcher, encoded: Encoded) -> bool:
    """Whether fused kernels score these; the matrix may then be built on their device."""
    with torch.inference_mode():
        device = encoded.mask.device
        return isinstance(matcher, CrossAttentionMatcher) and matcher.accepts_half(device)


def _width(encoded: Encoded) -> int:
    return encoded.fragments.shape[-1] if encoded.fragments is not None else 1


def _fits(images: Encoded, texts: Encoded) -> bool:
    bytes_needed = 4 * len(images) * len(texts)
    return bytes_needed <= FREE_SHARE * free_memory(images.mask.device)


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


def _trimmed(encoded: Encoded, ends: Tensor | None = None) -> Encoded:
    """Without the padding that all items share, or those do whose fragments end at ``ends``."""
    if not len(encoded) or not encoded.mask.shape[1]:
        return encoded
    ends = extents(encoded) if ends is None else ends
    return encoded.trim_to(max(1, int(ends.max())))


def fallback(model: Model, training: bool = False) -> str | None:
    """One line where PyTorch scores what a fused kernel could; None where there is no more to say.

    That is where the kernels do, and where there is none for the model's matcher. In ``training``
    a kernel has to have a backward pass, too.
    """
    matcher = model.matcher
    first = matcher.members[0] if isinstance(matcher, CopiedMatcher) else matcher
    if not isinstance(first, CrossAttentionMatcher) or not first.kernel_specs():
        return None
    line = without_kernels(model.device)
    if line is None and training and not all(trainable(spec) for spec in first.kernel_specs()):
        return "training by PyTorch: the fused kernel of this matcher has no backward pass"
    return line
