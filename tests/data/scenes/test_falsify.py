"""Scenes that show a foil: the foil is true of them, the caption is not, and they can be drawn."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from counterfoil.data.images import open_image
from counterfoil.data.scenes import (
    SceneCaption,
    could_be_true,
    describe,
    false_scene,
    falsify,
    is_true,
    make_scene,
    statement_of,
    tokens,
)
from counterfoil.data.scenes.draw import DrawnImage
from counterfoil.data.scenes.scene import SIZE


def with_text(caption: SceneCaption, foil: str) -> SceneCaption:
    for position, word in enumerate(tokens(foil)):
        if word != caption.words[position].text:
            caption = caption.with_word(position, word)
    return caption


@pytest.mark.parametrize("seed", range(3))
def test_a_false_scene_shows_the_foil_and_not_the_caption(seed) -> None:
    kinds, shown = Counter(), Counter()
    for family in range(25):
        scene, rng = make_scene((seed, 0, family, 0)), random.Random(f"{seed} {family}")
        for caption in describe(scene, rng, 5):
            foil = falsify(scene, caption, rng)
            if foil is None:
                continue
            kinds[foil.kinds[0]] += 1
            changed = false_scene(scene, caption, foil.text)
            if changed is None:
                continue
            shown[foil.kinds[0]] += 1
            assert is_true(changed, statement_of(with_text(caption, foil.text)))
            assert not could_be_true(changed, statement_of(caption))
            for obj in changed.objects:
                assert len(obj.boxes) == obj.count
                for x1, y1, x2, y2 in obj.boxes:
                    assert 0 <= x1 < x2 <= SIZE
                    assert 0 <= y1 < y2 <= SIZE
    assert shown["attribute"] > 0.8 * kinds["attribute"]
    assert shown["object"] > 0.6 * kinds["object"]
    assert sum(shown.values()) > 0.6 * sum(kinds.values())


def test_what_is_no_foil_of_the_scene_shows_nothing() -> None:
    scene = make_scene((0, 0, 1, 0))
    (caption,) = describe(scene, random.Random(0), 1)
    assert false_scene(scene, caption, caption.text) is None
    assert false_scene(scene, caption, caption.text + " indeed") is None
    noun = next(k for k, word in enumerate(caption.words) if word.role.startswith("noun"))
    words = tokens(caption.text)
    words[noun] = "volcano"
    assert false_scene(scene, caption, " ".join(words)) is None


def test_a_drawn_image_is_the_same_at_each_access_and_named_after_its_scene() -> None:
    one, other = DrawnImage(make_scene((0, 0, 1, 0))), DrawnImage(make_scene((0, 0, 1, 1)))
    assert one.read() == DrawnImage(make_scene((0, 0, 1, 0))).read()
    assert one.name != other.name
    assert one.read() != other.read()
    assert open_image(one).size == (SIZE, SIZE)
