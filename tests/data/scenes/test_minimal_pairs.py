"""Minimal pairs of drawn scenes: captions true, foils false and plausible, for any seed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.data.scenes import (
    SceneCaption,
    could_be_true,
    describe,
    is_true,
    make_scene,
    statement_of,
    tokens,
)
from counterfoil.data.scenes.minimal_pairs import (
    CHANGES,
    crossed_captions,
    is_plausible,
    minimal_foil,
)

families = st.tuples(st.integers(0, 10**6), st.integers(0, 5), st.integers(0, 10**6))


def foils_of(seed: tuple[int, ...], kind: str):
    scene, rng = make_scene(seed), random.Random(str(seed))
    for caption in describe(scene, rng, 5):
        foil = minimal_foil(scene, caption, kind, rng)
        if foil is not None:
            yield scene, caption, foil


@given(families, st.integers(0, 3), st.sampled_from(sorted(CHANGES)))
def test_captions_are_true_and_foils_false_by_the_generous_reading(family, member, kind) -> None:
    for scene, caption, foil in foils_of((*family, member), kind):
        assert is_true(scene, statement_of(caption))
        assert not could_be_true(scene, statement_of(foil))
        assert [word.text for word in foil.words] == tokens(foil.text)
        assert foil.text != caption.text
        assert caption.text.endswith(".") == foil.text.endswith(".")
        assert caption.text[0].isupper() == foil.text[0].isupper()


@given(families, st.integers(0, 3))
def test_true_captions_are_plausible(family, member) -> None:
    """What holds of foils by construction holds of the captions: no foil stands out by it."""
    scene = make_scene((*family, member))
    for caption in describe(scene, random.Random(str(family)), 5):
        assert is_plausible(scene, caption), caption.text


@given(families, st.integers(0, 3), st.sampled_from(sorted(CHANGES)))
def test_a_foil_changes_what_its_kind_says(family, member, kind) -> None:
    for _, caption, foil in foils_of((*family, member), kind):
        before, after = tokens(caption.text), tokens(foil.text)
        if kind.startswith("replace"):
            assert sum(one != two for one, two in zip(before, after, strict=True)) == 1
        elif kind.startswith("swap"):
            assert sorted(before) == sorted(after)
            assert sum(one != two for one, two in zip(before, after, strict=True)) == 2
        elif kind == "add_att":
            assert len(after) == len(before) + 1
            assert any(after[:n] + after[n + 1 :] == before for n in range(len(after)))
        else:
            assert after[: len(before)] == before
            assert after[len(before)] == "and"


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_many_scenes_give_every_kind(kind) -> None:
    made = [next(foils_of((1, 0, family, 0), kind), None) for family in range(60)]
    assert sum(one is not None for one in made) >= 15


@given(families, st.integers(1, 3))
def test_each_crossed_caption_is_true_of_its_own_scene_only(family, member) -> None:
    base, edited = make_scene((*family, 0)), make_scene((*family, member))
    rng = random.Random(str(family))
    for caption in describe(base, rng, 5):
        other = crossed_captions(base, edited, caption, rng)
        if other is not None:
            assert is_true(base, statement_of(caption))
            assert is_true(edited, statement_of(other))
            assert not could_be_true(edited, statement_of(caption))
            assert not could_be_true(base, statement_of(other))


def captions_with(scene, wanted: str) -> SceneCaption:
    rng = random.Random(0)
    for _ in range(400):
        for caption in describe(scene, rng, 5):
            if wanted in tokens(caption.text):
                return caption
    raise AssertionError(f"no caption has the word {wanted}")


def test_colors_that_a_thing_never_has_are_not_plausible() -> None:
    for family in range(200):
        scene = make_scene((0, 0, family, 0))
        index = next((n for n, o in enumerate(scene.objects) if o.kind == "horse"), None)
        if index is not None:
            break
    color = scene.objects[index].color
    caption = captions_with(scene, color)
    places = [n for n, word in enumerate(caption.words) if word.role.startswith("colour:")]
    position = next(n for n in places if caption.words[n].objects == (index,))
    assert is_plausible(scene, caption)
    assert not is_plausible(scene, caption.with_word(position, "purple"))
