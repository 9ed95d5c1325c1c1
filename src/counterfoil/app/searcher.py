"""Queries in batches: small indexes are held in memory and scored whole, others in two stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterfoil.core.storage.segments import Ids
from counterfoil.encoders import Encoded
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.search import SearchIndex
from counterfoil.search.items import Side
from counterfoil.search.query import rerank, scores_of, shortlist
from counterfoil.search.vectors import Floats, TopK

MAX_FLOATS = 1 << 25
"""Numbers of encoded items that may stay in memory, for each side."""

MAX_CAPTIONS = 2000
"""Captions looked at for one list of different ones."""

MAX_IMAGES_NAMED = 100
"""Images of one caption that are named."""

Blocks = list[tuple[Ids, Encoded]]


class Searcher:
    """The best items of an index for encoded queries."""

    def __init__(self, index: SearchIndex, held_floats: int = MAX_FLOATS) -> None:
        self.index = index
        # a cross-encoder reads every pair at length: its shortlist is worth the loss
        whole = not isinstance(index.model.matcher, CrossEncoder)
        self.held: dict[Side, Blocks | None] = {
            side: self._hold(side, held_floats) if whole else None for side in index.items
        }

    def search(
        self, asked: Side, target: Side, queries: Encoded, ks: Sequence[int]
    ) -> list[list[dict[str, Any]]]:
        """For each query its best items, as plain values; ``ks`` says how many.

        Identical captions are one item. They score alike, so they stand together.
        """
        if target == "images":
            return self._best(asked, target, queries, ks)
        total, wider = len(self.index.items[target]), 2
        while True:
            asked_for = [min(k * wider, total, MAX_CAPTIONS) for k in ks]
            found = [collapsed(hits) for hits in self._best(asked, target, queries, asked_for)]
            # one more than is shown, or the last of these may lack some of its captions
            if wider * max(ks) >= min(total, MAX_CAPTIONS) or all(
                len(hits) > k for hits, k in zip(found, ks, strict=True)
            ):
                return [hits[:k] for hits, k in zip(found, ks, strict=True)]
            wider *= 4

    def _best(
        self, asked: Side, target: Side, queries: Encoded, ks: Sequence[int]
    ) -> list[list[dict[str, Any]]]:
        most = min(max(ks), len(self.index.items[target]))
        if not most:
            return [[] for _ in ks]
        blocks = self.held[target] if asked != target else None
        found = (
            self._scored(target, queries, blocks, most)
            if blocks is not None
            else self._two_stages(asked, target, queries, most)
        )
        return [
            self._hits(target, ids[:k], scores[:k])
            for k, (ids, scores) in zip(ks, found, strict=True)
        ]

    def _hold(self, side: Side, most: int) -> Blocks | None:
        """All items of a side in blocks, or None where they are too many."""
        blocks: Blocks = []
        floats = 0
        for keys, encoded in self.index.items[side].blocks():
            part = encoded.fragments if encoded.fragments is not None else encoded.pooled
            floats += part.numel() if part is not None else 0
            if floats > most:
                return None
            blocks.append((keys, encoded))
        return blocks

    def _scored(
        self, target: Side, queries: Encoded, blocks: Blocks, k: int
    ) -> list[tuple[Ids, Floats]]:
        best = TopK(len(queries), k)
        for keys, encoded in blocks:
            best.update(keys, scores_of(self.index.model, target, queries, encoded))
        return list(zip(*best.result(), strict=True))

    def _two_stages(
        self, asked: Side, target: Side, queries: Encoded, k: int
    ) -> list[tuple[Ids, Floats]]:
        size = min(max(self.index.shortlist, k), len(self.index.items[target]))
        found = []
        for row in range(len(queries)):
            query = queries[row : row + 1]
            keys, _ = shortlist(self.index, asked, target, query, size)
            found.append(rerank(self.index, asked, target, query, keys[0], k))
        return found

    def _hits(self, target: Side, ids: Ids, scores: Floats) -> list[dict[str, Any]]:
        kept = ids >= 0
        about = self.index.items[target].about(ids[kept])
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
            for rank, (item, score) in enumerate(zip(about, scores[kept], strict=True), start=1)
        ]


def collapsed(hits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Captions with the same text as one hit each, which counts them and names their images."""
    by_text: dict[str, dict[str, Any]] = {}
    for hit in hits:
        first = by_text.setdefault(hit["text"], {**hit, "count": 0, "images": []})
        first["count"] += 1
        if hit["image"] not in first["images"] and len(first["images"]) < MAX_IMAGES_NAMED:
            first["images"].append(hit["image"])
    return [{**hit, "rank": rank} for rank, hit in enumerate(by_text.values(), start=1)]
