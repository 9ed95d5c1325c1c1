"""The nearest other pairs of every image–caption pair, and how far they agree with it.

After LEMoN (Zhang et al., ICML 2025): the captions of an image's neighbors should resemble its
caption, and the images of a caption's neighbors should resemble its image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.audit.survey import ImageBlocks
from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.models.model import Model
from counterfoil.scoring.encode import encode_texts
from counterfoil.search.first_stage import pooled_vectors

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Values = NDArray[np.float64]

COUNT = 30
"""Neighbors per pair and side, as in LEMoN."""

MAX_REFERENCE = 50_000
"""Pairs that neighbors are chosen from, at most, as in LEMoN; so the cost is linear in the data."""

BLOCK = 512

NEARNESS = 10.0
"""How fast the weight of a neighbor falls with its distance; chosen on dev splits."""


@dataclass(frozen=True)
class Side:
    """Neighbors of each pair on one side, as cosine distances [pairs, neighbors].

    ``near``: of the compared part (image or caption) and the neighbor's; ``gap``: of the other
    part and the neighbor's; ``match``: of the neighbor's own two parts. ``pairs`` are the
    neighbors. NaN and −1 if there are too few.
    """

    near: Floats
    gap: Floats
    match: Floats
    pairs: Ints


@dataclass(frozen=True)
class Neighbors:
    """Neighbors of the pairs of ``captions``: by image and, if they were searched, by caption.

    ``match`` [pairs] is the distance of a pair's own two parts.
    """

    captions: Ints
    match: Floats
    by_image: Side
    by_caption: Side | None


def find_neighbors(
    model: Model,
    split: Split,
    captions: Ints | None = None,
    *,
    by_caption: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Neighbors:
    """Neighbors of the captions of readable images, or of those given, which must be readable.

    Without ``by_caption``, only those by image are found. One vector per image and caption is
    in memory; fragments are encoded batch by batch.
    """
    progress = progress or Silent()
    row_of = np.full(len(split), -1, dtype=np.int64)
    parts: list[Tensor] = []
    with eval_mode(model):
        blocks = ImageBlocks(model, split, BLOCK)
        for block in progress.track(blocks, f"image vectors ({split.name})", len(blocks)):
            row_of[block.images] = sum(map(len, parts)) + np.arange(len(block.images))
            parts.append(torch.from_numpy(pooled_vectors(model, block.encoded).rows))
        if captions is None:
            captions = np.flatnonzero(row_of[split.image_of] >= 0).astype(np.int64)
        texts = [known_text(model.text, split.texts[int(number)]).text for number in captions]
        starts = range(0, len(texts), BLOCK)
        vectors = [
            torch.from_numpy(pooled_vectors(model, encode_texts(model, texts[i : i + BLOCK])).rows)
            for i in progress.track(starts, f"caption vectors ({split.name})", len(starts))
        ]
    if not parts or not vectors:
        raise DataError(f"split '{split.name}' has no readable image with a caption")
    images, words = (torch.cat(each).to(model.device) for each in (parts, vectors))
    owner = row_of[split.image_of[captions]]
    return neighbors_of(
        images, words, owner, captions, by_caption=by_caption, seed=seed, progress=progress
    )


@torch.inference_mode()
def neighbors_of(
    images: Tensor,
    texts: Tensor,
    owner: Ints,
    captions: Ints,
    *,
    count: int = COUNT,
    by_caption: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Neighbors:
    """From unit vectors of images [n, D] and of captions [m, D]; caption k has image owner[k]."""
    progress = progress or Silent()
    of = torch.from_numpy(owner).to(images.device)
    starts = range(0, len(owner), BLOCK)
    rows = [torch.arange(i, min(i + BLOCK, len(owner)), device=images.device) for i in starts]
    match = torch.cat([1 - (images[of[row]] * texts[row]).sum(1) for row in rows])
    chosen = np.arange(len(owner))
    if len(chosen) > MAX_REFERENCE:
        chosen = np.sort(np.random.default_rng(seed).choice(chosen, MAX_REFERENCE, replace=False))
    pool = torch.from_numpy(chosen).to(images.device)
    pool_images, pool_texts = images[of[pool]], texts[pool]
    sides: tuple[list[Side], list[Side]] = ([], [])
    for row in progress.track(rows, "neighbors", len(rows)):
        image, text, same = images[of[row]], texts[row], row[:, None] == pool[None]
        for side, (own, own_pool), (other, other_pool) in (
            (sides[0], (image, pool_images), (text, pool_texts)),
            (sides[1], (text, pool_texts), (image, pool_images)),
        )[: 1 + by_caption]:
            similar = (own @ own_pool.T).masked_fill(same, -torch.inf)
            values, where = similar.topk(min(count, len(pool)), dim=1)
            gap = 1 - (other[:, None] * other_pool[where]).sum(-1)
            side.append(_side(values, gap, match[pool[where]], pool[where]))
    joined = [
        Side(*(np.concatenate([getattr(part, name) for part in parts]) for name in NAMES))
        for parts in sides
        if parts
    ]
    return Neighbors(captions, match.cpu().numpy(), joined[0], joined[1] if by_caption else None)


NAMES = ("near", "gap", "match", "pairs")


def _side(similar: Tensor, gap: Tensor, match: Tensor, pairs: Tensor) -> Side:
    """Without the pair itself, which is among the best if there are too few others."""
    lost = similar == -torch.inf
    near, far, own = (
        part.masked_fill(lost, torch.nan).cpu().numpy() for part in (1 - similar, gap, match)
    )
    return Side(near, far, own, pairs.masked_fill(lost, -1).cpu().numpy())


def disagreement(side: Side, reliable: Values) -> Values:
    """The mean distance [pairs] to the neighbors, nearer and more reliable ones counting more.

    ``reliable`` [pairs] has the weight of each pair as a neighbor. NaN if there are no neighbors.
    """
    weights = np.exp(-NEARNESS * side.near.astype(np.float64)) * reliable[side.pairs]
    total = np.nansum(weights, axis=1)
    gaps = np.nansum(weights * side.gap, axis=1)
    return np.divide(gaps, total, out=np.full(len(total), np.nan), where=total > 0)


COPY_NEARNESS = 20.0
"""How fast a caption stops being a copy of another with its distance; chosen on a dev split."""


def summed_disagreement(side: Side, reliable: Values) -> Values:
    """The sum [pairs] whose mean is `disagreement`, per neighbor searched.

    Many near and reliable neighbors that differ say more than few. NaN without neighbors.
    """
    weights = np.exp(-NEARNESS * side.near.astype(np.float64)) * reliable[side.pairs]
    return _where_known(side, np.nansum(weights * side.gap, axis=1) / side.gap.shape[1])


def copy_disagreement(side: Side, reliable: Values) -> Values:
    """How far the image of nearly the same caption elsewhere differs [pairs]; the most of all.

    ``side`` has neighbors by caption. Copies that fit their own image count more. Near 0 if no
    other caption is alike or if the images of those that are alike resemble this one.
    """
    weights = np.exp(-COPY_NEARNESS * side.near.astype(np.float64)) * reliable[side.pairs]
    return _where_known(side, np.nan_to_num(weights * side.gap).max(axis=1))


def _where_known(side: Side, values: Values) -> Values:
    return np.where((side.pairs >= 0).any(axis=1), values, np.nan)
