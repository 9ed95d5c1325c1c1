"""Is a foil of a drawn scene really false? What the words claim, held against the scene."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from counterfoil.data.scenes import captions_of, falsify, load_scenes, scene_of
from counterfoil.data.scenes.scene import Relation, Scene, SceneObject
from counterfoil.data.scenes.words import SceneCaption, Word
from counterfoil.evaluation.foil_truth import foil_verdict, has_truth, verdict_on
from counterfoil.foils.lists import NUMERALS


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
        Word(text.lower(), (0,), next(span for span in PHRASES if span[0] <= place < span[1]), role)
        for place, (text, role) in enumerate(PARTS)
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
