"""The first screen: different images, and short sentences of the library."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.app.home import (
    EXAMPLE_LETTERS,
    PROMPTS,
    example_queries,
    farthest_first,
    in_varied_order,
)
from counterfoil.data.text.tokenizers import known_text
from counterfoil.scoring.encode import encode_texts
from counterfoil.search import SearchIndex


def copies(groups: int, each: int, noise: float, seed: int) -> np.ndarray:
    """``each`` near-duplicates of every one of ``groups`` vectors, one group after the other."""
    draw = np.random.default_rng(seed)
    vectors = np.repeat(draw.normal(size=(groups, 16)), each, axis=0)
    return (vectors + noise * draw.normal(size=vectors.shape)).astype(np.float32)


@given(st.integers(4, 12), st.integers(2, 6), st.integers(0, 99))
def test_copies_are_never_side_by_side(groups, each, seed) -> None:
    vectors = copies(groups, each, 0.01, seed)
    order = farthest_first(vectors, len(vectors))
    assert sorted(order) == list(range(len(vectors)))
    group = [at // each for at in order]
    assert len(set(group[:groups])) == groups  # all kinds first
    assert all(one != other for one, other in pairwise(group))


@pytest.mark.parametrize("vectors", [np.zeros((5, 3)), np.ones((1, 3)), np.full((4, 2), np.nan)])
def test_vectors_without_any_difference_keep_their_order(vectors) -> None:
    order = farthest_first(vectors.astype(np.float32), 10)
    assert sorted(order) == list(range(len(vectors)))


def test_copies_in_a_library_are_far_apart_on_its_first_screen(content, pairs, tmp_path) -> None:
    different = [pairs.test.ids.index(name) for name in in_varied_order(content.index)[:4]]
    few = pairs.test.select([at for at in different for _ in range(3)])
    split = replace(few, ids=[f"{name}-{at}" for at, name in enumerate(few.ids)])
    index = SearchIndex.build(tmp_path / "index", content.index.model, split, first_stage="pooled")
    order = [name.rpartition("-")[0] for name in in_varied_order(index)]
    assert [len(set(order[start : start + 4])) for start in (0, 4, 8)] == [4, 4, 4]


def test_examples_are_short_different_captions_of_the_library(content, pairs) -> None:
    examples = example_queries(content.index, in_varied_order(content.index))
    captions = {text.rstrip(".") for texts in pairs.test.captions for text in texts}
    assert len(set(examples)) == 4
    assert set(examples) <= captions
    assert max(map(len, examples)) <= EXAMPLE_LETTERS


def test_long_strange_or_missing_captions_make_no_examples(content, pairs, tmp_path) -> None:
    few = pairs.test.select(range(3))
    texts = [["a tree " * 30], ["zyzzyva xyzzy", "A tree ."], []]
    index = SearchIndex.build(
        tmp_path / "index", content.index.model, replace(few, captions=texts), first_stage="pooled"
    )
    assert example_queries(index, in_varied_order(index)) == ["A tree"]


def test_a_library_without_captions_has_sentences_that_fit_some_of_its_images(
    content, pairs, tmp_path
) -> None:
    split = replace(pairs.test, captions=[[] for _ in pairs.test.ids])
    model = content.index.model
    index = SearchIndex.build(tmp_path / "index", model, split, first_stage="pooled")
    examples = example_queries(index, in_varied_order(index))
    known = [text for text in PROMPTS if not known_text(model.text, text).unknown]
    assert 0 < len(examples) == min(4, len(known))
    stored = index.items["images"].encoded(np.arange(len(split)))
    scores = model.matcher(stored, encode_texts(model, known)).detach().numpy()
    outstanding = (scores.max(axis=0) - scores.mean(axis=0)) / scores.std(axis=0)
    order = [known[at] for at in np.argsort(-outstanding, kind="stable")]
    assert examples == order[: len(examples)]
