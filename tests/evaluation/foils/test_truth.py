"""Is a foil of a drawn scene really false? What the words claim, held against the scene."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from counterfoil.data.scenes import captions_of, falsify, load_scenes, scene_of
from counterfoil.data.scenes.scene import Relation, Scene, SceneObject
from counterfoil.data.scenes.truth import SceneCaption, Word
from counterfoil.evaluation.foils.truth import foil_verdict, has_truth, true_foil_kind, verdict_on
from counterfoil.foils.lexicon import NUMERALS


def an_object(kind: str, colour: str, size: str, left: float) -> SceneObject:
    return SceneObject(
        kind, colour, size, "plain", 1, "front", ((left, 100.0, left + 40.0, 160.0),)
    )


SCENE = Scene(
    seed=(0,),
    family=0,
    member=0,
    backdrop="meadow",
    objects=(an_object("dog", "brown", "large", 20.0), an_object("house", "red", "large", 150.0)),
    relations=(Relation(0, "left of", 1),),
)
PARTS = [
    ("A", ""), ("large", "size:0"), ("dog", "noun:0"), ("left", "relation:0:1"), ("of", ""),
    ("a", ""), ("red", "colour:1"), ("house", "noun:1"), ("in", ""), ("a", ""), ("meadow", ""),
]  # fmt: skip
PHRASES = [(0, 3), (3, 5), (5, 8), (8, 11)]
CAPTION = SceneCaption(
    "A large dog left of a red house in a meadow.",
    tuple(
        Word(text.lower(), (int(5 <= place < 8),), span, role)
        for span in PHRASES
        for place, (text, role) in enumerate(PARTS)
        if span[0] <= place < span[1]
    ),
)


@pytest.mark.parametrize(
    ("foil", "verdict"),
    [
        ("A large dog left of a red house in a meadow.", "true"),
        ("A large cat left of a red house in a meadow.", "false"),
        ("A large dog right of a red house in a meadow.", "false"),
        ("A large dog left of a blue house in a meadow.", "false"),
        ("A large animal left of a red building in a meadow.", "true"),
        ("A brown dog left of a red house in a meadow.", "true"),
        ("A green dog left of a red house in a meadow.", "false"),
        ("A dog dog left of a red house in a meadow.", "false"),
        ("A large dog left of a large house in a meadow.", "true"),
        ("A large dog left of a striped house in a meadow.", "false"),
        ("The large dog left of the red house in a meadow.", "true"),
        ("A large dog left of a red house in a room.", "false"),
        ("A large dog left of a red house in a park.", "unsure"),
        ("Two large dogs left of a red house in a meadow.", "false"),
        ("Seven large dogs left of a red house in a meadow.", "false"),
        ("Striped large dog left of a red house in a meadow.", "unsure"),
        ("A large dog left of a red house in two meadow.", "unsure"),
        ("A large dog left indoors a red house in a meadow.", "false"),
        ("A large dog left outdoors a red house in a meadow.", "true"),
        ("A large dog left of a red house.", "unsure"),
    ],
)
def test_what_a_foil_claims_is_held_against_the_scene(foil, verdict) -> None:
    assert foil_verdict(SCENE, CAPTION, foil) == verdict


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return load_scenes(tmp_path_factory.mktemp("scenes"), (4, 4, 60), workers=1).test


def test_every_caption_is_true_and_every_falsified_one_is_false(split) -> None:
    assert has_truth(split)
    false = 0
    for image in range(len(split)):
        extras = split.extras[image]
        captions = captions_of(extras, split.captions[image])
        for place, caption in enumerate(captions):
            assert verdict_on(split, image, place, caption.text) == "true"
            foil = falsify(scene_of(extras), caption, random.Random(image), 2)
            if foil is not None:
                assert verdict_on(split, image, place, foil.text) == "false"
                false += 1
    assert false > 200


def test_several_groups_together_may_make_up_a_number() -> None:
    dogs = [replace(SCENE.objects[0], count=count) for count in (2, 3)]
    scene = replace(SCENE, objects=(*dogs,), relations=())
    words = (Word("two", (0,), (0, 2), "count:0"), Word("dogs", (0,), (0, 2), "noun:0"))
    caption = SceneCaption("two dogs", words)
    verdicts = {word: foil_verdict(scene, caption, f"{word} dogs") for word in NUMERALS[1:]}
    assert [word for word in verdicts if verdicts[word] == "true"] == ["two", "three", "five"]
    assert "unsure" not in verdicts.values()


def test_two_looks_at_once_are_a_contradiction() -> None:
    words = [("a", ""), ("brown", "colour:0"), ("large", "size:0"), ("dog", "noun:0")]
    caption = SceneCaption(
        "a brown large dog", tuple(Word(text, (0,), (0, 4), role) for text, role in words)
    )
    assert foil_verdict(SCENE, caption, "a brown brown dog") == "true"
    assert foil_verdict(SCENE, caption, "a brown white dog") == "false"


def caption_of(*parts: tuple[str, str, tuple[int, int]]) -> SceneCaption:
    """A caption of (word, role, phrase)."""
    words = tuple(Word(text, (0,), phrase, role) for text, role, phrase in parts)
    return SceneCaption(" ".join(text for text, _, _ in parts), words)


@pytest.mark.parametrize(
    ("foil", "verdict"),
    [
        ("a dog in the meadow", "true"),
        ("a dog in the street", "false"),
        ("a dog in the park", "unsure"),
        ("a dog in the left", "true"),
        ("a dog in the house", "false"),
    ],
)
def test_surroundings_may_stand_where_a_place_in_the_picture_stood(foil, verdict) -> None:
    caption = caption_of(
        ("a", "", (0, 2)), ("dog", "noun:0", (0, 2)),
        ("in", "", (2, 5)), ("the", "", (2, 5)), ("foreground", "position:0", (2, 5)),
    )  # fmt: skip
    assert foil_verdict(SCENE, caption, foil) == verdict


@pytest.mark.parametrize(
    ("foil", "verdict"),
    [("brown dogs", "true"), ("white dogs", "false"), ("house dogs", "false")],
)
def test_a_look_may_stand_where_a_number_stood(foil, verdict) -> None:
    scene = replace(SCENE, objects=(replace(SCENE.objects[0], count=3),), relations=())
    caption = caption_of(("three", "count:0", (0, 2)), ("dogs", "noun:0", (0, 2)))
    assert foil_verdict(scene, caption, foil) == verdict


@pytest.mark.parametrize(
    ("foil", "verdict"),
    [
        ("a dog left of a house", "true"),
        ("a dog right of a house", "false"),
        ("a dog standing left a house", "true"),
        ("a dog holding flying a house", "false"),
        ("a dog left house a house", "false"),
        ("a dog standing with a house", "false"),
    ],
)
def test_a_relation_is_found_wherever_its_phrase_tells_it(foil, verdict) -> None:
    scene = replace(SCENE, relations=(Relation(0, "in front of", 1), Relation(0, "left of", 1)))
    caption = caption_of(
        ("a", "", (0, 2)), ("dog", "noun:0", (0, 2)),
        ("standing", "", (2, 4)), ("before", "relation:0:1", (2, 4)),
        ("a", "", (4, 6)), ("house", "noun:1", (4, 6)),
    )  # fmt: skip
    assert foil_verdict(scene, caption, foil) == verdict


@pytest.mark.parametrize(
    ("foil", "kind_of_truth"),
    [
        ("A big dog left of a red house in a meadow.", "same"),
        ("The large dog left of the red house in a meadow.", "same"),
        ("A large animal left of a red house in a meadow.", "meant"),
        ("A brown dog left of a red house in a meadow.", "meant"),
        ("A large dog next of a red house in a meadow.", "generous"),
        ("A large cat left of a red house in a meadow.", None),
        ("A large dog left of a red house in a park.", None),
    ],
)
def test_a_true_foil_is_true_in_some_manner(foil, kind_of_truth) -> None:
    assert true_foil_kind(SCENE, CAPTION, foil) == kind_of_truth
