"""How much of exhaustive scoring the two stages find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from counterfoil.errors import DataError
from counterfoil.progress import Progress
from counterfoil.search.items import BLOCK, Side
from counterfoil.search.search import exhaustive, rerank, shortlist
from counterfoil.search.state import IndexState

DEPTHS = (1, 5, 10)


@dataclass(frozen=True)
class Recall:
    """Of the best K of exhaustive scoring, the share among the best K of the two stages.

    ``at`` is by K. Where scores are equal, either item will do.
    """

    asked_with: Side
    target: Side
    queries: int
    items: int
    shortlist: int
    at: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "at": {str(k): value for k, value in self.at.items()}}


@torch.inference_mode()
def measure_recall(
    index: IndexState, queries: int, size: int | None, seed: int, progress: Progress
) -> list[Recall]:
    """Both ways, with captions and images of the index as queries."""
    if queries < 1:
        raise DataError(f"recall: at least 1 query, got {queries}")
    ways: list[tuple[Side, Side]] = [("captions", "images"), ("images", "captions")]
    if not all(len(items) for items in index.items.values()):
        raise DataError(f"{index.folder}: recall needs images and captions in the index")
    return [
        _one_way(index, asked, target, queries, size or index.shortlist, seed, progress)
        for asked, target in ways
    ]


def _one_way(
    index: IndexState,
    asked: Side,
    target: Side,
    queries: int,
    size: int,
    seed: int,
    progress: Progress,
) -> Recall:
    pool, total = index.items[asked].table.live_ids, len(index.items[target])
    count, size = min(queries, len(pool)), min(size, total)
    chosen = np.sort(np.random.default_rng(seed).choice(pool, count, replace=False))
    depths = [k for k in DEPTHS if k <= total]
    hits = dict.fromkeys(depths, 0.0)
    starts = range(0, count, BLOCK)
    for start in progress.track(starts, f"measuring recall ({target})", len(starts)):
        batch = index.items[asked].encoded(chosen[start : start + BLOCK])
        _, truth = exhaustive(index, target, batch, depths[-1])
        keys, _ = shortlist(index, asked, target, batch, max(size, depths[-1]))
        for row in range(len(batch)):
            found = keys[row][index.items[target].table.has(keys[row])]
            _, scores = rerank(index, asked, target, batch[row : row + 1], found, depths[-1])
            for k in depths:
                edge = truth[row, k - 1] - 1e-5 * max(1.0, abs(float(truth[row, k - 1])))
                hits[k] += float((scores[:k] >= edge).sum()) / k
    return Recall(asked, target, count, total, size, {k: hits[k] / count for k in depths})
