"""Near-duplicates against a loop over all pairs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.audit.duplicates import content, near_duplicates, similar_sets

WORDS = ["dog", "cat", "tree", "ball", "house", "red", "blue", "car", "boat", "lamp"]
sets = st.lists(st.frozensets(st.sampled_from(WORDS), min_size=1), max_size=25, unique=True)


@given(sets, st.sampled_from([0.5, 0.6, 0.75, 0.8, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_prefix_filter_loses_no_pair_and_adds_none(given_sets, similar) -> None:
    expected = {
        frozenset((i, j))
        for i, a in enumerate(given_sets)
        for j, b in enumerate(given_sets[:i])
        if len(a & b) / len(a | b) >= similar - 1e-9
    }
    found = [frozenset((i, j)) for i, j, _ in similar_sets(given_sets, similar)]
    assert len(found) == len(set(found))
    assert set(found) == expected


captions = st.lists(
    st.tuples(st.lists(st.sampled_from(WORDS), max_size=6), st.integers(0, 4)), max_size=20
)


@given(captions)
@settings(max_examples=50, deadline=None)
def test_each_caption_knows_the_other_images_that_say_the_same(drawn) -> None:
    texts = {
        number: f"There is a {' and a '.join(words)}." for number, (words, _) in enumerate(drawn)
    }
    image_of = [image for _, image in drawn]
    found = near_duplicates(texts, image_of)
    for number, text in texts.items():
        own = content(text)
        near = {
            other: len(own & content(texts[other])) / len(own | content(texts[other]))
            for other in texts
            if image_of[other] != image_of[number] and min(len(own), len(content(texts[other]))) > 1
        }
        alike = {other: value for other, value in near.items() if value >= 0.8 - 1e-9}
        assert (number in found) == bool(alike)
        if alike:
            assert found[number].others == len({image_of[other] for other in alike})
            assert found[number].similarity == max(alike.values())
            assert alike[found[number].caption] == found[number].similarity


def test_function_words_and_endings_do_not_make_a_difference() -> None:
    texts = {
        0: "A dog is running on the beach.",
        1: "two cars",
        2: "dogs run at a beach",
        3: "Dog!",
    }
    found = near_duplicates(texts, [0, 1, 2, 3])
    assert set(found) == {0, 2}
    assert found[0].caption == 2


def test_captions_of_one_image_may_say_the_same() -> None:
    assert near_duplicates({0: "a red car", 1: "the red car"}, [5, 5]) == {}


def test_a_caption_that_everybody_has_stays_cheap() -> None:
    texts = dict.fromkeys(range(3000), "a photo of something")
    found = near_duplicates(texts, list(range(3000)))
    assert found[7].others == 2999
    assert found[7].images is found[8].images
