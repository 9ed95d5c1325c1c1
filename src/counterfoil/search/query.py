"""Search an index: a first stage finds a shortlist, the matcher ranks it; and its recall."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from counterfoil.core.errors import ArgumentError, ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.registry import short_repr
from counterfoil.core.storage.segments import Ids
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.images import FileImage, open_image
from counterfoil.data.text.tokenizers import require_known, unknown_note
from counterfoil.data.text.words import MOST_LETTERS, MOST_WORDS, words
from counterfoil.encoders import Encoded
from counterfoil.models.explain import explain_encoded
from counterfoil.models.match import Match
from counterfoil.models.model import Model, open_picture
from counterfoil.scoring.encode import score_all
from counterfoil.search.first_stage import ItemEncoder
from counterfoil.search.items import BLOCK_ITEMS, Side
from counterfoil.search.state import IndexState
from counterfoil.search.vectors import Floats, TopK

Picture = Union[str, Path, Image.Image, NDArray[Any], Tensor]  # noqa: UP007 - read at run time

DEPTHS = (1, 5, 10)


@dataclass(frozen=True)
class Query:
    """One encoded item, its side, and notes for the user."""

    label: str
    side: Side
    encoded: Encoded
    notes: list[str] = field(default_factory=list)


def text_query(model: Model, text: str, first: Model | None = None) -> Query:
    if not isinstance(text, str):
        raise ArgumentError(f"the query: expected a text, got {short_repr(text)}")
    if len(text) > MOST_LETTERS:
        raise DataError(
            f"the query has {len(text):,} letters, at most {MOST_LETTERS:,} are read: shorten it"
        )
    query_words = words(text)
    if not query_words:
        raise DataError("the query has no words: say what to look for")
    if len(query_words) > MOST_WORDS:
        raise DataError(
            f"the query has {len(query_words):,} words, at most {MOST_WORDS} are read: shorten it"
        )
    note = unknown_note(require_known(model.text, text).unknown_words)
    encoded = ItemEncoder(model, first).texts([text])
    return Query(text, "captions", encoded, [note] if note else [])


def image_query(index: IndexState, image: Picture) -> Query:
    """A picture, its pixels, an image file, or the id of an image in the index."""
    if not isinstance(image, (str, Path)):
        return Query("image", "images", _encode(index.encoder, open_picture(image)))
    path = Path(image)
    if path.is_file():
        return Query(str(image), "images", _encode(index.encoder, open_image(FileImage(path))))
    if path.is_dir():
        raise DataError(f"{image}: a folder; give an image file, or the id of an image")
    names = index.items["images"].names
    if str(image) not in names:
        example = f" (ids look like '{next(iter(names))}')" if names else ""
        raise DataError(
            f"{image}: neither an image file nor the id of an image in the index{example}"
        )
    key = np.array([names[str(image)]], dtype=np.int64)
    return Query(str(image), "images", index.items["images"].encoded(key))


def _encode(encoder: ItemEncoder, pixels: Image.Image) -> Encoded:
    model = encoder.model
    if model.fragments_from is None:
        raise ConfigError(
            "this model was trained on precomputed features, so it cannot read an image file; "
            "give the id of an image in the index instead"
        )
    return encoder.images(pad_fragments([model.reader.fragments(pixels)]))


@dataclass(frozen=True)
class Request:
    """Arguments of `search`; exactly one of ``text`` and ``image`` is set."""

    text: str | None = None
    image: Picture | None = None
    k: int = 10
    target: Side | None = None
    shortlist: int | None = None
    exhaustive: bool = False
    explain: int = 0


@dataclass(frozen=True)
class Hit:
    """One result: its rank and score, and those of the first stage.

    A caption has ``text`` and ``image``; an image has ``captions`` and ``pixels`` (its source).
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
    """Results, best first. The matcher ranked ``shortlist`` of all ``items``.

    ``notes`` are for the user; ``seconds`` are the times of encoding and of each stage.
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


def _check_numbers(request: Request) -> None:
    for name, number, least in (
        ("k", request.k, 1),
        ("explain", request.explain, 0),
        ("shortlist_size", request.shortlist, 1),
    ):
        if number is None and name == "shortlist_size":
            continue
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ArgumentError(f"{name}: expected a whole number, got {number!r}")
        if number < least:
            raise ArgumentError(f"{name}: at least {least}, got {number}")


@torch.inference_mode()
def search(index: IndexState, request: Request) -> Results:
    """Results of a query, re-ranked by the matcher; ``exhaustive`` scores every item with it.

    A text finds images and an image captions, unless ``target`` says otherwise. Items of the
    query's own side cannot be matched; they are ranked by the cosine of pooled vectors. The first
    ``explain`` results are explained.
    """
    _check_numbers(request)
    clock = _Clock()
    query = _read_query(index, request)
    clock.lap("encoding")
    target = request.target or ("images" if query.side == "captions" else "captions")
    items = index.items[target]
    if not len(items):
        similar = len(index.items[query.side]) and request.target is None
        hint = f"find similar {query.side} with --target {query.side}, or " if similar else ""
        raise DataError(
            f"{index.folder}: there are no {target} in this index; {hint}add some with: "
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
        best = exhaustive(index, target, query.encoded, k)
        ids, scores, size = best[0][0], best[1][0], len(items)
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
                match=_explain_hit(index, query, target, key, about[rank])
                if matched and rank < request.explain
                else None,
            )
        )
    notes = list(query.notes)
    if request.explain and not matched:
        notes.append(f"not explained: the query and the results are both {target}")
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
    index: IndexState, source: Side, target: Side, queries: Encoded, size: int
) -> tuple[Ids, Floats]:
    """Keys and scores [Q, size] of the first stage for queries of the side ``source``."""
    vectors = index.proxy.vectors(queries, source, "query")
    ids, scores = index.vectors[target].search(vectors, size)
    if len(queries) == 1:  # drop items deleted from the index just now
        present = index.items[target].table.has(ids[0])
        ids, scores = ids[:, present], scores[:, present]
    return ids, scores


def rerank(
    index: IndexState, source: Side, target: Side, query: Encoded, keys: Ids, k: int
) -> tuple[Ids, Floats]:
    """The best ``k`` of a shortlist for one query, scored by the matcher.

    Items of the query's own side are scored by the cosine of pooled vectors.
    """
    best = TopK(1, k)
    for start in range(0, len(keys), BLOCK_ITEMS):
        part = keys[start : start + BLOCK_ITEMS]
        items = index.items[target].encoded(part)
        if source == target:
            one, others = (index.proxy.same_side_vectors(x).rows for x in (query, items))
            best.update(part, torch.from_numpy(one @ others.T))
        else:
            best.update(part, scores_of(index.model, target, query, items))
    ids, scores = best.result()
    return ids[0], scores[0]


def exhaustive(index: IndexState, target: Side, queries: Encoded, k: int) -> tuple[Ids, Floats]:
    """The best ``k`` of all items, each scored by the matcher."""
    best = TopK(len(queries), k)
    for keys, encoded in index.items[target].blocks():
        best.update(keys, scores_of(index.model, target, queries, encoded))
    return best.result()


def scores_of(model: Model, target: Side, queries: Encoded, items: Encoded) -> Tensor:
    """Scores [Q, B] on the CPU."""
    if target == "images":
        return score_all(model, items, queries).T.contiguous()
    return score_all(model, queries, items)


def _read_query(index: IndexState, request: Request) -> Query:
    if (request.text is None) == (request.image is None):
        raise DataError("the query must be a text or an image, one of the two")
    if request.text is not None:
        return text_query(index.model, request.text, index.encoder.first)
    assert request.image is not None  # noqa: S101 - for the type checker
    return image_query(index, request.image)


def _explain_hit(
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


@dataclass(frozen=True)
class Recall:
    """Share of the best K of exhaustive scoring that the two stages find; ``at`` is by K.

    Items of equal score are interchangeable.
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
    """Recall in both directions, with captions and images of the index as queries."""
    if queries < 1:
        raise DataError(f"recall: at least 1 query, got {queries}")
    ways: list[tuple[Side, Side]] = [("captions", "images"), ("images", "captions")]
    if not all(len(items) for items in index.items.values()):
        raise DataError(f"{index.folder}: recall needs images and captions in the index")
    return [
        _measure_direction(index, source, target, queries, size or index.shortlist, seed, progress)
        for source, target in ways
    ]


def _measure_direction(
    index: IndexState,
    source: Side,
    target: Side,
    queries: int,
    size: int,
    seed: int,
    progress: Progress,
) -> Recall:
    pool, total = index.items[source].table.live_ids, len(index.items[target])
    count, size = min(queries, len(pool)), min(size, total)
    chosen = np.sort(np.random.default_rng(seed).choice(pool, count, replace=False))
    depths = [k for k in DEPTHS if k <= total]
    hits = dict.fromkeys(depths, 0.0)
    starts = range(0, count, BLOCK_ITEMS)
    for start in progress.track(starts, f"measuring recall ({target})", len(starts)):
        batch = index.items[source].encoded(chosen[start : start + BLOCK_ITEMS])
        _, truth = exhaustive(index, target, batch, depths[-1])
        keys, _ = shortlist(index, source, target, batch, max(size, depths[-1]))
        for row in range(len(batch)):
            present = keys[row][index.items[target].table.has(keys[row])]
            query = batch[row : row + 1]
            # as a search for k results does, which scores at least as many
            ranked = {
                most: rerank(index, source, target, query, present[:most], depths[-1])[1]
                for most in {max(size, k) for k in depths}
            }
            for k in depths:
                scores = ranked[max(size, k)]
                edge = truth[row, k - 1] - 1e-5 * max(1.0, abs(float(truth[row, k - 1])))
                hits[k] += float((scores[:k] >= edge).sum()) / k
    return Recall(source, target, count, total, size, {k: hits[k] / count for k in depths})
