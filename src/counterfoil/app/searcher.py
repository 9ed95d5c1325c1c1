"""Batched search: small indexes are cached and scored exhaustively, others in two stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from counterfoil.core.storage.segments import Ids
from counterfoil.encoders import Encoded
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.search import SearchIndex
from counterfoil.search.items import Side
from counterfoil.search.query import rerank, scores_of, shortlist
from counterfoil.search.vectors import Floats, TopK

MAX_FLOATS = 1 << 25
"""Most numbers of encoded items that stay in memory, per side."""

JOINED_BLOCKS = 256

MAX_CAPTIONS = 2000
"""Most captions scored for one list of distinct captions."""

MAX_IMAGES_NAMED = 100
"""Most images listed for one caption."""

Blocks = list[tuple[Ids, Encoded]]


class Searcher:
    """The best items of an index for encoded queries."""

    def __init__(self, index: SearchIndex, cached_floats: int = MAX_FLOATS) -> None:
        self.index = index
        # a cross-encoder is too slow to score every pair, so it always uses a shortlist
        exhaustive = not isinstance(index.model.matcher, CrossEncoder)
        self.cached: dict[Side, Blocks | None] = {
            side: self._try_cache(side, cached_floats) if exhaustive else None
            for side in index.items
        }

    def search(
        self, source: Side, target: Side, queries: Encoded, ks: Sequence[int]
    ) -> list[list[dict[str, Any]]]:
        """The best items of each query as plain values; ``ks`` is the number of items per query.

        Identical captions are one item. They have the same score, so they are neighbors.
        """
        if target == "images":
            return self._best(source, target, queries, ks)
        total, wider = len(self.index.items[target]), 2
        while True:
            counts = [min(k * wider, total, MAX_CAPTIONS) for k in ks]
            results = [collapsed(hits) for hits in self._best(source, target, queries, counts)]
            # one more than returned: else the last one may lack some of its captions
            if wider * max(ks) >= min(total, MAX_CAPTIONS) or all(
                len(hits) > k for hits, k in zip(results, ks, strict=True)
            ):
                return [hits[:k] for hits, k in zip(results, ks, strict=True)]
            wider *= 4

    def _best(
        self, source: Side, target: Side, queries: Encoded, ks: Sequence[int]
    ) -> list[list[dict[str, Any]]]:
        most = min(max(ks), len(self.index.items[target]))
        if not most:
            return [[] for _ in ks]
        blocks = self.cached[target] if source != target else None
        results = (
            self._scored(target, queries, blocks, most)
            if blocks is not None
            else self._two_stages(source, target, queries, most)
        )
        return [
            self._hits(target, ids[:k], scores[:k])
            for k, (ids, scores) in zip(ks, results, strict=True)
        ]

    def _try_cache(self, side: Side, most: int) -> Blocks | None:
        """All items of a side in blocks; None if they have more than ``most`` numbers."""
        blocks: Blocks = []
        floats = 0
        for keys, encoded in self.index.items[side].blocks():
            part = encoded.fragments if encoded.fragments is not None else encoded.pooled
            floats += part.numel() if part is not None else 0
            if floats > most:
                return None
            blocks.append((keys, encoded))
        is_pooled = bool(blocks) and blocks[0][1].fragments is None
        return _joined(blocks) if is_pooled else blocks

    def _scored(
        self, target: Side, queries: Encoded, blocks: Blocks, k: int
    ) -> list[tuple[Ids, Floats]]:
        best = TopK(len(queries), k)
        for keys, encoded in blocks:
            best.update(keys, scores_of(self.index.model, target, queries, encoded))
        return list(zip(*best.result(), strict=True))

    def _two_stages(
        self, source: Side, target: Side, queries: Encoded, k: int
    ) -> list[tuple[Ids, Floats]]:
        size = min(max(self.index.shortlist, k), len(self.index.items[target]))
        results: list[tuple[Ids, Floats]] = []
        for row in range(len(queries)):
            query = queries[row : row + 1]
            keys, _ = shortlist(self.index, source, target, query, size)
            results.append(rerank(self.index, source, target, query, keys[0], k))
        return results

    def _hits(self, target: Side, ids: Ids, scores: Floats) -> list[dict[str, Any]]:
        valid = ids >= 0
        about = self.index.items[target].about(ids[valid])
        return [
            {
                "id": item["id"],
                "image": item.get("image", item["id"]),
                "count": 1,
                "images": [item.get("image", item["id"])],
                "rank": rank,
                "score": float(score),
                "text": item.get("text"),
                "captions": item.get("captions", []),
            }
            for rank, (item, score) in enumerate(zip(about, scores[valid], strict=True), start=1)
        ]


def _joined(blocks: Blocks) -> Blocks:
    """Fewer, larger blocks of vectors, which are compared faster than they are taken in turn."""
    return [
        (np.concatenate([keys for keys, _ in part]), Encoded.cat([encoded for _, encoded in part]))
        for part in (blocks[k : k + JOINED_BLOCKS] for k in range(0, len(blocks), JOINED_BLOCKS))
    ]


def collapsed(hits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge captions with the same text into one hit, with their number and their images."""
    by_text: dict[str, dict[str, Any]] = {}
    for hit in hits:
        first = by_text.setdefault(hit["text"], {**hit, "count": 0, "images": []})
        first["count"] += 1
        if hit["image"] not in first["images"] and len(first["images"]) < MAX_IMAGES_NAMED:
            first["images"].append(hit["image"])
    return [{**hit, "rank": rank} for rank, hit in enumerate(by_text.values(), start=1)]
