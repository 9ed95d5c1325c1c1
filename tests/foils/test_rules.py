"""Foils by rule: what changes, what must not, and how often they are false of a drawn scene."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.data.scenes import describe, make_scene
from counterfoil.data.scenes.vocabulary import (
    COLOR_WORDS,
    NOUNS,
    NUMBERS,
    PATTERN_WORDS,
    RELATION_WORDS,
    SIZE_WORDS,
)
from counterfoil.data.text.words import words
from counterfoil.foils import KINDS, rule_foils
from counterfoil.foils.lexicon import (
    ATTRIBUTES,
    LONG_RELATIONS,
    NOUN_FORMS,
    NUMERALS,
    RELATIONS,
    THINGS,
)
from counterfoil.foils.rules import REORDERING
from tests.conftest import thinned
from tests.foils.scene_truth import is_false

ARTICLES = {"a", "an"}
LISTED = [*NOUN_FORMS, *RELATIONS, *ATTRIBUTES, *NUMERALS]
FILLING = ["a", "an", "the", "is", "to", "of", "by", "in front of", "next to", "it", "3", ",", "."]
FILLING += ["A", "Dog", "CAT", "man's", "isn't", '"', "young", "sits", "İ", "café", "…", "\n"]
CAPTIONS = st.lists(st.sampled_from(LISTED) | st.sampled_from(FILLING), max_size=14).map(" ".join)
SEEDS = st.integers(0, 10**6)


def foils(caption: str, kind: str, count: int = 50, avoid=frozenset(), seed: int = 0) -> set[str]:
    return {foil.text for foil in rule_foils(caption, random.Random(seed), [kind], count, avoid)}


@given(CAPTIONS | st.text(), SEEDS, st.integers(1, 5))
def test_a_foil_differs_exactly_where_it_says(caption, seed, count) -> None:
    result = rule_foils(caption, random.Random(seed), KINDS, count)
    assert len(result) <= count
    assert len({foil.text for foil in result}) == len(result)
    before = words(caption)
    for foil in result:
        after = words(foil.text)
        assert len(after) == len(before)
        changed = tuple(i for i in range(len(before)) if before[i] != after[i])
        assert changed
        assert foil.positions == changed
        assert foil.original == tuple(before[i] for i in changed)
        assert foil.replacement == tuple(after[i] for i in changed)
        assert foil.kind in KINDS


@given(CAPTIONS, SEEDS, st.sets(st.sampled_from(LISTED), max_size=40))
def test_no_foil_brings_in_an_avoided_word(caption, seed, avoid) -> None:
    own = set(words(caption))
    for foil in rule_foils(caption, random.Random(seed), KINDS, 10, avoid):
        new = set(foil.replacement) - ARTICLES
        assert (new - own if foil.kind in REORDERING else new).isdisjoint(avoid)


@given(CAPTIONS, SEEDS)
@settings(deadline=None)
def test_the_same_seed_gives_the_same_foils(caption, seed) -> None:
    one, other = (rule_foils(caption, random.Random(seed), KINDS, 4) for _ in range(2))
    assert one == other


@given(CAPTIONS, SEEDS)
@settings(deadline=None)
def test_whatever_is_asked_for_is_found_if_it_exists(caption, seed) -> None:
    every = {foil.text for foil in rule_foils(caption, random.Random(0), KINDS, 10**6)}
    result = rule_foils(caption, random.Random(seed), KINDS, 3)
    assert len(result) == min(3, len(every))
    assert {foil.text for foil in result} <= every


@pytest.mark.parametrize("caption", ["", " ", "...", "Nothing here.", "a", "two", "on"])
def test_captions_with_nothing_to_replace_have_no_foils(caption) -> None:
    assert rule_foils(caption, random.Random(0), KINDS, 3) == []


@pytest.mark.parametrize("length", thinned([1_000, 10_000], 1_000))
def test_a_caption_of_thousands_of_words_has_foils(length) -> None:
    caption = " ".join(["a dog on a table near two red cars,"] * (length // 10))
    found = rule_foils(caption, random.Random(0), KINDS, 2)
    assert len(found) == 2
    assert len(words(found[0].text)) == length


def test_nouns_become_other_things_of_their_category() -> None:
    result = foils("A man and his dogs.", "noun")
    assert "A woman and his dogs." in result
    assert "A man and his cats." in result
    assert not any("puppies" in text or "guy" in text or " boy " in text for text in result)


@pytest.mark.parametrize("thing", THINGS)
def test_no_thing_is_replaced_by_what_it_may_be(thing) -> None:
    assert THINGS[thing].rivals
    for rival in THINGS[thing].rivals:
        assert rival not in THINGS[thing].related
        assert thing not in THINGS[rival].related


def test_words_for_the_same_thing_are_avoided_with_it() -> None:
    assert not foils("a man", "noun", avoid={"lady"}) & {"a woman"}
    assert "an animal" not in foils("a person", "noun", avoid={"dog"})
    assert "a ball under a box" not in foils("a ball on a box", "relation", avoid={"beneath"})
    assert "a grey car" not in foils("a red car", "attribute", avoid={"gray"})
    assert not any(text.startswith("two") for text in foils("5 cars", "numeral", avoid={"two"}))


def test_articles_follow_their_nouns() -> None:
    result = foils("An umbrella and a dog", "noun")
    assert "A box and a dog" in result
    assert "An umbrella and an elephant" in result
    assert "an orange car" in foils("a green car", "attribute")


def test_case_and_punctuation_stay() -> None:
    assert 'The "CAT", red.' in foils('The "DOG", red.', "noun")
    assert "Cats' toys" in foils("Dogs' toys", "noun")
    assert "THREE DOGS ON A TABLE!" in foils("A DOG ON A TABLE!", "numeral")
    assert "A TABLE ON AN ELEPHANT" in foils("AN ELEPHANT ON A TABLE", "swap")


def test_numbers_change_and_one_becomes_several_where_nothing_must_agree() -> None:
    assert "Three red balls" in foils("A red ball", "numeral")
    assert "two sheep" in foils("a sheep", "numeral")
    assert "seven men" in foils("two men", "numeral")
    assert "4 men" in foils("3 men", "numeral")
    assert not any("a man" in text for text in foils("two men", "numeral"))
    for caption in ("a man is here", "a man sits", "there is a man", "a box with a lid on it"):
        assert foils(caption, "numeral") == set()
    for caption in ("a dog show", "a field", "a dress", "at 5 o'clock", "two years old"):
        assert foils(caption, "numeral") == set()


def test_relations_change_but_not_settings() -> None:
    assert "a dog under a table" in foils("a dog on a table", "relation")
    assert "a dog to the right of a cat" in foils("a dog to the left of a cat", "relation")
    assert "a dog on the right" in foils("a dog on the left", "relation")
    assert "a dog on top of a car" in foils("a dog in front of a car", "relation")
    assert "a box with a cat under it" in foils("a box with a cat on it", "relation")
    assert "a bike pushed by a boy" in foils("a bike ridden by a boy", "relation")
    assert foils("a man in a red shirt in a park", "relation") == set()


def test_subject_and_object_change_sides_unless_that_says_the_same() -> None:
    assert foils("a man riding a horse", "swap") == {"a horse riding a man"}
    assert foils("two dogs sitting on a car", "swap") == {"two cars sitting on a dog"}
    for caption in ("a dog next to a cat", "a man behind a guy", "a dog and a cat"):
        assert foils(caption, "swap") == set()


def test_unknown_kinds_and_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'noun'"):
        rule_foils("a dog", random.Random(0), ["nuon"])
    with pytest.raises(ConfigError, match="at least 1"):
        rule_foils("a dog", random.Random(0), count=0)


def test_the_words_of_drawn_scenes_are_covered() -> None:
    nouns = {form for noun in NOUNS for form in (noun.singular, noun.plural)}
    assert nouns <= NOUN_FORMS.keys()
    related = set(RELATIONS) | {word for relation in LONG_RELATIONS for word in relation}
    assert RELATION_WORDS.keys() <= related
    assert {*COLOR_WORDS, *SIZE_WORDS, *PATTERN_WORDS} <= ATTRIBUTES.keys()
    assert NUMBERS.keys() - ARTICLES <= set(NUMERALS)


# Observed on these scenes: 1.000, 0.988, 0.996, 0.990 and 0.996. The lists were not made on them.
@pytest.mark.parametrize(
    ("kind", "least"),
    [("noun", 0.99), ("numeral", 0.97), ("relation", 0.97), ("attribute", 0.97), ("swap", 0.97)],
)
def test_foils_of_drawn_scenes_are_false_as_a_rule(kind, least) -> None:
    seen: Counter[bool | None] = Counter()
    for family in range(5000, 5120):
        scene = make_scene((family, 0, family % 4, 0))
        captions = describe(scene, random.Random(family), 5)
        for caption in captions:
            others = {word for c in captions if c is not caption for word in words(c.text)}
            rng = random.Random(caption.text)
            for foil in rule_foils(caption.text, rng, [kind], avoid=others):
                seen[is_false(scene, caption, foil)] += 1
    decided = seen[True] + seen[False]
    assert decided > 150
    assert seen[True] / decided > least, seen
