"""The first screen: different images of the library first, and short sentences to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.data.text.tokenizers import known_text
from counterfoil.data.text.words import words
from counterfoil.scoring.encode import encode_texts
from counterfoil.search import SearchIndex
from counterfoil.search.items import BLOCK_ITEMS
from counterfoil.search.query import scores_of

CANDIDATES, VARIED = 2000, 240
"""Images whose vectors are read, evenly over the library, and those chosen of them."""

NEAR = 0.2
"""Images nearer than this share of a usual distance are near-duplicates."""

EXAMPLES, EXAMPLE_LETTERS, EXAMPLE_WORDS = 4, 44, range(2, 10)
"""Number of example queries, and their length in letters and words."""

PROMPTED = 48
"""Images that are scored with the prompts."""

PROMPTS = (
    "a dog", "a cat", "a horse", "a bird", "a ball", "a house", "a car", "a boat on the water",
    "children playing", "a smiling woman", "a man on a bike", "a group of people", "mountains",
    "people in the street", "a beach", "snow", "trees", "flowers", "food on a table", "at night",
)  # fmt: skip
"""Sentences to try with a library without captions: those that fit some of its images best."""

Vectors = NDArray[np.float32]


def in_varied_order(index: SearchIndex) -> list[str]:
    """All ids of the images: a choice of different ones, then the others as stored."""
    items = index.items["images"]
    ids = list(items.names)
    step = max(1, -(-len(ids) // CANDIDATES))
    candidates = list(range(0, len(ids), step))
    if len(candidates) < 2:
        return ids
    keys = np.array([items.names[ids[at]] for at in candidates], dtype=np.int64)
    vectors = np.concatenate(
        [
            index.proxy.same_side_vectors(items.encoded(keys[start : start + BLOCK_ITEMS])).rows
            for start in range(0, len(keys), BLOCK_ITEMS)
        ]
    )
    first = [candidates[at] for at in farthest_first(vectors, VARIED)]
    chosen = set(first)
    return [ids[at] for at in first] + [name for at, name in enumerate(ids) if at not in chosen]


def farthest_first(vectors: Vectors, count: int) -> list[int]:
    """Rows such that each is as far as possible from those before it; the first is row 0.

    When only near-duplicates of chosen rows are left, a new round begins with the row farthest
    from the last one. So copies of an image are spread out.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.nan_to_num(vectors / np.maximum(norms, 1e-12))
    chosen, left = [0], np.ones(len(unit), dtype=np.bool_)
    left[0] = False
    distances = 1 - unit @ unit[0]
    near = NEAR * float(np.median(distances))
    while len(chosen) < min(count, len(unit)):
        best = int(np.argmax(np.where(left, distances, -np.inf)))
        if distances[best] <= near:
            distances = 1 - unit @ unit[chosen[-1]]
            best = int(np.argmax(np.where(left, distances, -np.inf)))
            distances = 1 - unit @ unit[best]
        chosen.append(best)
        left[best] = False
        distances = np.minimum(distances, 1 - unit @ unit[best])
    return chosen


def example_queries(index: SearchIndex, ids: Sequence[str]) -> list[str]:
    """Short captions of the first images with known words, with as few words in common as possible.

    Each next one is the caption with the smallest share of words that were in one before. Without
    captions, the examples are general sentences that fit some images much better than others.
    """
    if not len(index.items["captions"]):
        return _fitting_prompts(index, ids[:PROMPTED])
    items = index.items["images"]
    keys = np.array([items.names[name] for name in ids[:VARIED]], dtype=np.int64)
    texts = [_shortest(index, about) for about in items.about(keys)]
    left = list(dict.fromkeys(text for text in texts if text is not None))
    chosen: list[str] = []
    seen: set[str] = set()
    while left and len(chosen) < EXAMPLES:
        text = min(left, key=lambda one: _share_seen(one, seen))  # the first of equal ones
        chosen.append(text)
        left.remove(text)
        seen.update(words(text))
    return chosen


@torch.inference_mode()
def _fitting_prompts(index: SearchIndex, ids: Sequence[str]) -> list[str]:
    """The prompts whose best image stands out most from the others, in standard deviations."""
    known = [text for text in PROMPTS if not known_text(index.model.text, text).unknown]
    if not known or not ids:
        return []
    items = index.items["images"]
    keys = np.array([items.names[name] for name in ids], dtype=np.int64)
    queries = encode_texts(index.model, known)
    scores = scores_of(index.model, "images", queries, items.encoded(keys)).float()
    spread = scores.std(dim=1, correction=0).clamp(min=1e-9)
    outstanding = (scores.amax(dim=1) - scores.mean(dim=1)) / spread
    best = sorted(range(len(known)), key=lambda at: -float(outstanding[at]))
    return [known[at] for at in best[:EXAMPLES]]


def _shortest(index: SearchIndex, about: dict[str, Any]) -> str | None:
    """The shortest caption of an image that makes an example, without its full stop."""
    texts = (text.strip().rstrip(". ") for text in about.get("captions", []))
    fitting = [
        text
        for text in texts
        if len(text) <= EXAMPLE_LETTERS
        and len(words(text)) in EXAMPLE_WORDS
        and not known_text(index.model.text, text).unknown
    ]
    return min(fitting, key=len, default=None)


def _share_seen(text: str, seen: set[str]) -> float:
    own = set(words(text))
    return len(own & seen) / len(own)
