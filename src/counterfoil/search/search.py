"""A query in two stages: vectors find a shortlist, the model's own matcher ranks it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.evaluation.scoring import score_all
from counterfoil.models.explain import Match, explain_encoded
from counterfoil.models.model import Model
from counterfoil.search.items import BLOCK, Side
from counterfoil.search.queries import Query, image_query, text_query
from counterfoil.search.scan import Best
from counterfoil.search.state import IndexState
from counterfoil.search.table import Ids
from counterfoil.search.vectors import Floats


@dataclass(frozen=True)
class Request:
    """What `search` is asked for; either ``text`` or ``image``."""

    text: str | None = None
    image: str | Path | Image.Image | None = None
    k: int = 10
    target: Side | None = None
    shortlist: int | None = None
    exhaustive: bool = False
    explain: int = 0


@dataclass(frozen=True)
class Hit:
    """One result: its place and score, and those that the first stage gave it.

    ``text`` is a caption's; ``captions`` and ``pixels`` (where it lies) are an image's.
    """

    id: str
    rank: int
    score: float
    first_rank: int | None
    first_score: float | None
    text: str | None = None
    image: str | None = None
    captions: list[str] = field(default_factory=list)
    pixels: dict[str, Any] | None = None
    match: Match | None = None

    def as_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key != "match"}
        return {**plain, "match": self.match.as_dict() if self.match is not None else None}


@dataclass(frozen=True)
class Results:
    """Results, best first. ``shortlist`` is how many the matcher ranked, of ``items`` in all.

    ``notes`` say what a user should know; ``seconds`` are those of encoding and of each stage.
    """

    query: str
    target: Side
    hits: list[Hit]
    shortlist: int
    items: int
    exhaustive: bool
    seconds: dict[str, float]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "hits": [hit.as_dict() for hit in self.hits]}


@torch.inference_mode()
def search(index: IndexState, request: Request) -> Results:
    """Results of a query, re-ranked by the matcher, or of ``exhaustive`` scoring of every item.

    A text asks for images and an image for captions, unless ``target`` says otherwise. What is on
    the side of the query itself (captions like this text, images like this one) cannot be matched;
    it is ranked by the cosine of pooled vectors. The first ``explain`` results are explained.
    """
    if request.k < 1:
        raise DataError(f"k: at least 1 result, got {request.k}")
    if request.shortlist is not None and request.shortlist < 1:
        raise DataError(f"shortlist: at least 1 item, got {request.shortlist}")
    clock = _Clock()
    query = _query(index, request)
    clock.lap("encoding")
    target = request.target or ("images" if query.side == "captions" else "captions")
    items = index.items[target]
    if not len(items):
        raise DataError(
            f"{index.folder}: there are no {target} in this index; add some with: "
            f"counterfoil index add {index.folder} PAIRS"
        )
    matched = target != query.side
    k = min(request.k, len(items))
    size = min(max(request.shortlist or index.shortlist, k), len(items))
    first_ids: Ids | None = None
    first_scores: Floats = np.empty(0, dtype=np.float32)
    if not (request.exhaustive and matched):
        first_ids, first_scores = shortlist(index, query.side, target, query.encoded, size)
        first_ids, first_scores = first_ids[0], first_scores[0]
        clock.lap("first stage")
    if first_ids is None:
        found = exhaustive(index, target, query.encoded, k)
        ids, scores, size = found[0][0], found[1][0], len(items)
    else:
        ids, scores = rerank(index, query.side, target, query.encoded, first_ids, k)
    clock.lap("second stage")
    places = {} if first_ids is None else {int(key): at for at, key in enumerate(first_ids)}
    about = items.about(ids)
    hits = []
    for rank, (key, score) in enumerate(zip(ids.tolist(), scores.tolist(), strict=True)):
        at = places.get(key)
        hits.append(
            Hit(
                id=about[rank]["id"],
                rank=rank + 1,
                score=score,
                first_rank=None if at is None else at + 1,
                first_score=None if at is None else float(first_scores[at]),
                text=about[rank].get("text"),
                image=about[rank].get("image"),
                captions=about[rank].get("captions", []),
                pixels=about[rank].get("pixels"),
                match=_explained(index, query, target, key, about[rank])
                if matched and rank < request.explain
                else None,
            )
        )
    notes = list(query.notes)
    if request.k > len(items):
        notes.append(f"there are only {len(items)} {target} in the index")
    return Results(
        query.label,
        target,
        hits,
        size,
        len(items),
        request.exhaustive and matched,
        clock.laps,
        notes,
    )


def shortlist(
    index: IndexState, asked: Side, target: Side, queries: Encoded, size: int
) -> tuple[Ids, Floats]:
    """Keys and scores [Q, size] that the first stage finds for queries of one side."""
    vectors = index.proxy.vectors(queries, asked)
    ids, scores = index.vectors[target].search(vectors, size)
    if len(queries) == 1:  # what the first stage has and the index does not was just deleted
        kept = index.items[target].table.has(ids[0])
        ids, scores = ids[:, kept], scores[:, kept]
    return ids, scores


def rerank(
    index: IndexState, asked: Side, target: Side, query: Encoded, keys: Ids, k: int
) -> tuple[Ids, Floats]:
    """The best ``k`` of a shortlist of one query, scored by the matcher.

    Where both are of one side, by the cosine of their pooled vectors.
    """
    best = Best(1, k)
    for start in range(0, len(keys), BLOCK):
        part = keys[start : start + BLOCK]
        items = index.items[target].encoded(part)
        if asked == target:
            one, others = (index.proxy.alike(x).rows for x in (query, items))
            best.offer(part, torch.from_numpy(one @ others.T))
        else:
            best.offer(part, scores_of(index.model, target, query, items))
    ids, scores = best.result()
    return ids[0], scores[0]


def exhaustive(index: IndexState, target: Side, queries: Encoded, k: int) -> tuple[Ids, Floats]:
    """The best ``k`` of all items, each of them scored by the matcher."""
    best = Best(len(queries), k)
    for keys, encoded in index.items[target].blocks():
        best.offer(keys, scores_of(index.model, target, queries, encoded))
    return best.result()


def scores_of(model: Model, target: Side, queries: Encoded, items: Encoded) -> Tensor:
    """Scores [Q, B] on the CPU."""
    if target == "images":
        return score_all(model, items, queries).T.contiguous()
    return score_all(model, queries, items)


def _query(index: IndexState, request: Request) -> Query:
    if (request.text is None) == (request.image is None):
        raise DataError("ask with a text or with an image, one of the two")
    if request.text is not None:
        return text_query(index.model, request.text, index.encoder.first)
    assert request.image is not None  # noqa: S101 - for the type checker
    return image_query(index, request.image)


def _explained(
    index: IndexState, query: Query, target: Side, key: int, about: dict[str, Any]
) -> Match:
    if target == "images":
        return explain_encoded(
            index.model, index.items["images"].encoded(np.array([key])), query.label
        )
    return explain_encoded(index.model, query.encoded, about["text"])


class _Clock:
    """Seconds from one lap to the next."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
