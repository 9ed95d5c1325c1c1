"""Exchanged words and phrases: what is exchanged, what would stay true, and how it is written."""

from __future__ import annotations

import random
import re

import pytest

from counterfoil.data.duplicates import spoken
from counterfoil.data.text.words import words
from counterfoil.foils.rules import rule_foils


def swapped(caption: str) -> set[str]:
    """All word swaps of a caption."""
    return {foil.text for foil in rule_foils(caption, random.Random(0), ["word-swap"], 500)}


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A black dog jumps over a white fence.", "A white dog jumps over a black fence."),
        ("A black dog jumps over a white fence.", "A black fence jumps over a white dog."),
        ("A black dog jumps over a white fence.", "A white fence jumps over a black dog."),
        ("a dog running quickly chases a man", "a man running quickly chases a dog"),
        ("a dog runs quickly and a man walks slowly", "a dog runs slowly and a man walks quickly"),
        ("a dog runs quickly and a man walks slowly", "a dog walks quickly and a man runs slowly"),
        ("A girl holds an orange umbrella", "An orange umbrella holds a girl"),
    ],
)
def test_a_word_swap_exchanges_two_words_or_phrases_of_a_class(caption, expected) -> None:
    foils = rule_foils(caption, random.Random(0), ["word-swap"], 50)
    assert expected in [foil.text for foil in foils]
    for foil in foils:
        one, two = words(caption), words(foil.text)
        articles = {"a": "an", "an": "an"}
        assert sorted(articles.get(w, w) for w in one) == sorted(articles.get(w, w) for w in two)


@pytest.mark.parametrize("caption", ["a man and a woman", "a red and white ball", "dogs, cats"])
def test_words_that_a_conjunction_joins_are_not_swapped(caption) -> None:
    assert rule_foils(caption, random.Random(0), ["word-swap"], 5) == []


def test_a_qualified_word_is_swapped_with_one_that_it_is_joined_with() -> None:
    foils = rule_foils("a red dog and a cat", random.Random(0), ["word-swap"], 5)
    assert [foil.text for foil in foils] == ["a red cat and a dog"]


def test_a_word_swap_is_never_another_caption_of_the_image() -> None:
    caption = "a dog chases a man"
    assert rule_foils(caption, random.Random(0), ["word-swap"], 5)
    true = frozenset({spoken("A man chases a dog.")})
    assert rule_foils(caption, random.Random(0), ["word-swap"], 5, true=true) == []


@pytest.mark.parametrize(
    "caption",
    [
        "The boy, the girl and the dog play.",
        "a red, white and blue ball",
        "A dog runs, jumps and barks.",
        "A brown dog and a white dog play.",
        "a red dog, a red cat, and a red bird",
        "two dogs and two cats",
        "The bus is near the car.",
        "A man is standing beside a woman.",
        "A white dog is next to a black dog.",
        "a dog close to a cat",
        "A man plays with another man.",
        "a bush near a shrub",
    ],
)
def test_an_exchange_that_stays_true_is_left_out(caption) -> None:
    assert swapped(caption) == set()


@pytest.mark.parametrize(
    ("caption", "foil"),
    [
        ("A man with a dog and a woman with a cat.", "A man with a cat and a woman with a dog."),
        ("a white dog next to a black cat", "a black dog next to a white cat"),
        ("a dog and a red cat", "a cat and a red dog"),
        ("two dogs and three cats", "two cats and three dogs"),
        (
            "a man, a woman, and a child sit on a bench",
            "a man, a woman, and a bench sit on a child",
        ),
        ("a dog behind a cat", "a cat behind a dog"),
    ],
)
def test_an_exchange_that_changes_the_meaning_stays(caption, foil) -> None:
    assert foil in swapped(caption)


@pytest.mark.parametrize(
    "caption",
    [
        "A police officer standing next to a building sees the ground.",
        "A dog in front of a car chases a cat on top of a box.",
        "a man far from a house sees a dog to the left of a tree",
    ],
)
def test_relations_of_several_words_stay_whole(caption) -> None:
    relation = re.compile("next to|in front of|on top of|far from|to the left of")
    foils = swapped(caption)
    assert foils
    for foil in foils:
        assert relation.findall(foil) == relation.findall(caption), foil


@pytest.mark.parametrize(
    ("caption", "foil"),
    [
        (
            "A woman is in an empty brick yard, near a bike rack under a blue umbrella.",
            "A woman is in a blue umbrella, near a bike rack under an empty brick yard.",
        ),
        ("Three men (smiling) chase a dog.", "A dog (smiling) chase three men."),
        ("A big dog -- wet -- under cats!", "Cats -- wet -- under a big dog!"),
        (
            'The girl in a big "red" car; behind dogs .',
            'Dogs in a big "red" car; behind the girl .',
        ),
        ("A BIG DOG, WET, UNDER CATS", "CATS, WET, UNDER A BIG DOG"),
    ],
)
def test_punctuation_keeps_its_spaces(caption, foil) -> None:
    assert foil in swapped(caption)


@pytest.mark.parametrize("seed", range(20))
def test_no_exchange_detaches_a_sign(seed) -> None:
    """Random lists of phrases with commas: a comma follows a word and precedes a space."""
    rng = random.Random(seed)
    phrases = ["a dog", "two small cats", "the man", "an old red umbrella", "boats", "a girl's hat"]
    links = [", chasing ", " under ", "; behind ", ", on ", " (over) "]
    parts = rng.sample(phrases, 4)
    caption = parts[0] + "".join(rng.choice(links) + part for part in parts[1:]) + "."
    for foil in swapped(caption):
        assert not re.search(r"\s[,;.')]|[,;](?! )|\( | '|(under|behind|on|chasing)'", foil), foil
        assert len(words(foil)) == len(words(caption))
