"""Example searches both ways: a query, what came first, and whether it was right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from counterfoil.data.pairs import Split
from counterfoil.scoring.encode import SplitScores


@dataclass(frozen=True)
class Hit:
    """One result: index of the image or caption in the split, its score, whether it is right."""

    index: int
    score: float
    right: bool


@dataclass(frozen=True)
class Search:
    """A query (index of a caption or an image in the split), its first hits, its true rank."""

    query: int
    hits: list[Hit]
    rank: int


@dataclass(frozen=True)
class Gallery:
    """Searches with a caption for images, and with an image for captions."""

    text_to_image: list[Search]
    image_to_text: list[Search]


def example_searches(
    found: SplitScores, split: Split, count: int = 3, hits: int = 5, seed: int = 0
) -> Gallery:
    """``count`` searches each way, with queries drawn at random, not picked."""
    rng = np.random.default_rng(seed)
    n_images, n_texts = found.scores.shape
    captions = rng.choice(n_texts, size=min(count, n_texts), replace=False)
    images = rng.choice(n_images, size=min(count, n_images), replace=False)
    owner = torch.from_numpy(found.image_of)
    by_text = [
        _search(
            found.texts[t],
            found.scores[:, t],
            torch.arange(n_images) == owner[t],
            found.images,
            hits,
        )
        for t in map(int, captions)
    ]
    by_image = [
        _search(found.images[i], found.scores[i], owner == i, found.texts, hits)
        for i in map(int, images)
    ]
    return Gallery(by_text, by_image)


def _search(
    query: int, scores: torch.Tensor, right: torch.Tensor, names: list[int], hits: int
) -> Search:
    best = scores[right].max() if right.any() else torch.tensor(float("-inf"))
    rank = 1 + int((scores[~right] >= best).sum())
    top = scores.topk(min(hits, len(scores)))
    return Search(
        query,
        [
            Hit(names[int(i)], float(score), bool(right[int(i)]))
            for score, i in zip(top.values, top.indices, strict=True)
        ],
        rank,
    )
