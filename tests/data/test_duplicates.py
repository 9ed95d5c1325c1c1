"""Duplicate captions against a loop over all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.data.duplicates import (
    DuplicateCounts,
    content,
    count_duplicates,
    identical_groups,
    near_duplicates,
    similar_sets,
    spoken,
    with_twin,
)

WORDS = ["dog", "cat", "tree", "ball", "house", "red", "blue", "car", "boat", "lamp"]
sets = st.lists(st.frozensets(st.sampled_from(WORDS), min_size=1), max_size=25, unique=True)


@given(sets, st.sampled_from([0.5, 0.6, 0.75, 0.8, 1.0]))
def test_the_prefix_filter_loses_no_pair_and_adds_none(given_sets, similar) -> None:
    expected = {
        frozenset((i, j))
        for i, a in enumerate(given_sets)
        for j, b in enumerate(given_sets[:i])
        if len(a & b) / len(a | b) >= similar - 1e-9
    }
    result = [frozenset((i, j)) for i, j, _ in similar_sets(given_sets, similar)]
    assert len(result) == len(set(result))
    assert set(result) == expected


captions = st.lists(
    st.tuples(st.lists(st.sampled_from(WORDS), max_size=6), st.integers(0, 4)), max_size=20
)


@given(captions)
def test_each_caption_knows_the_other_images_that_say_the_same(drawn) -> None:
    texts = {
        number: f"There is a {' and a '.join(words)}." for number, (words, _) in enumerate(drawn)
    }
    image_of = [image for _, image in drawn]
    result = near_duplicates(texts, image_of)
    for number, text in texts.items():
        own = content(text)
        near = {
            other: len(own & content(texts[other])) / len(own | content(texts[other]))
            for other in texts
            if image_of[other] != image_of[number] and min(len(own), len(content(texts[other]))) > 1
        }
        alike = {other: value for other, value in near.items() if value >= 0.8 - 1e-9}
        assert (number in result) == bool(alike)
        if alike:
            assert result[number].others == len({image_of[other] for other in alike})
            assert result[number].similarity == max(alike.values())
            assert alike[result[number].caption] == result[number].similarity


def test_function_words_and_endings_do_not_make_a_difference() -> None:
    texts = {
        0: "A dog is running on the beach.",
        1: "two cars",
        2: "dogs run at a beach",
        3: "Dog!",
    }
    result = near_duplicates(texts, [0, 1, 2, 3])
    assert set(result) == {0, 2}
    assert result[0].caption == 2


def test_captions_of_one_image_may_say_the_same() -> None:
    assert near_duplicates({0: "a red car", 1: "the red car"}, [5, 5]) == {}


def test_a_caption_that_everybody_has_stays_cheap() -> None:
    texts = dict.fromkeys(range(3000), "a photo of something")
    result = near_duplicates(texts, list(range(3000)))
    assert result[7].others == 2999
    assert result[7].images is result[8].images


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("A dog runs.", "a  DOG, runs", True),
        ("A dog's ball", "a dog\u2019s ball!", True),
        ("caf\u00e9", "cafe\u0301", True),  # one letter, or a letter and its accent
        ("?!", "? !", True),
        ("?!", "!!", False),
        ("a dog runs", "runs a dog", False),
        ("\u0915\u093f", "\u0915\u093e", False),  # two Hindi words that differ in a vowel sign
        ("\u98de\u673a", "\u98de\u673a\u3002", True),
    ],
)
def test_captions_are_identical_without_case_space_and_punctuation(one, other, same) -> None:
    assert (spoken(one) == spoken(other)) is same
    groups = identical_groups([one, other])
    assert with_twin(groups, np.array([0, 1])).all() == same
    assert not with_twin(groups, np.array([4, 4])).any()


@given(captions)
def test_counts_of_duplicates_are_those_of_a_loop_over_all_pairs(drawn) -> None:
    texts = [f"There is a {' and a '.join(words)}." for words, _ in drawn]
    image_of = np.array([image for _, image in drawn], dtype=np.int64)
    exact, near = 0, 0
    for number, text in enumerate(texts):
        others = [t for t, image in zip(texts, image_of, strict=True) if image != image_of[number]]
        if spoken(text) in map(spoken, others):
            exact += 1
        elif any(map(_nearly(content(text)), map(content, others))):
            near += 1
    assert count_duplicates(texts, image_of) == DuplicateCounts(exact, near)


def _nearly(own):
    def same(other) -> bool:
        if min(len(own), len(other)) < 2:
            return False
        return own == other or (len(own ^ other) == 1 and max(len(own), len(other)) >= 5)

    return same


def test_a_split_without_captions_has_no_duplicates() -> None:
    assert count_duplicates([], np.zeros(0, dtype=np.int64)) == DuplicateCounts(0, 0)
