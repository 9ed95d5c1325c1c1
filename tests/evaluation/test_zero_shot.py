"""Zero-shot classification by prompts: classes of files, captions and scenes; who is right."""

from __future__ import annotations

import json

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.data.pairs import Split
from counterfoil.data.scenes import load_scenes
from counterfoil.evaluation.zero_shot import (
    ClassSet,
    caption_classes,
    classes_of,
    correct_classes,
    read_classes,
)


def split(*captions: list[str]) -> Split:
    return Split("test", [f"i{n}" for n in range(len(captions))], list(captions))


PHOTOS = split(["A dog runs.", "two dogs"], ["A cat on a fire truck"], ["Nothing to see"])


def test_the_best_class_of_an_image_must_be_one_of_its_own() -> None:
    labels = (frozenset({0}), frozenset({1, 2}), frozenset(), frozenset({2}))
    classes = ClassSet("three", ("a", "b", "c"), labels, ("{}", "one {}"))
    assert classes.prompts == ["a", "one a", "b", "one b", "c", "one c"]
    scores = np.array(
        [
            [1, 3, 1, 1, 0, 0],  # a: right
            [9, 0, 1, 1, 5, 5],  # c: right, by the mean of its prompts
            [9, 9, 9, 9, 9, 9],  # without a class: left out
            [0, 0, 4, 4, 4, 4],  # b and c equal: a tie counts against the model
        ]
    )
    right, images = correct_classes(scores, classes, [0, 1, 2, 3])
    assert right.tolist() == [True, True, False]
    assert images.tolist() == [0, 1, 3]
    assert classes.chance == pytest.approx((1 + 2 + 1) / 3 / 3)


def test_class_names_alone_are_looked_up_in_the_captions(tmp_path) -> None:
    path = tmp_path / "animals.txt"
    path.write_text("dog\n\ncat\nfire truck\ntruck\nfire\n")
    classes = read_classes(path, PHOTOS)
    assert classes.name == "animals"
    assert classes.classes == ("dog", "cat", "fire truck", "truck", "fire")
    assert classes.labels == (frozenset({0}), frozenset({1, 2, 3, 4}), frozenset())


def test_labels_and_templates_of_a_file_are_used(tmp_path) -> None:
    path = tmp_path / "classes.json"
    tree = {
        "classes": ["indoors", "outdoors"],
        "templates": ["taken {}."],
        "labels": {"i0": "outdoors", "i2": ["indoors"], "elsewhere": "indoors"},
    }
    path.write_text(json.dumps(tree))
    classes = read_classes(path, PHOTOS)
    assert classes.labels == (frozenset({1}), frozenset(), frozenset({0}))
    assert classes.prompts == ["taken indoors.", "taken outdoors."]
    assert classes.unknown == ("elsewhere",)
    assert "1 labels are of images that the split does not have (elsewhere)" in classes.note()


@pytest.mark.parametrize("template", ["a {color} {}.", "a { {}", "{} {0}", "{{{}}}", "100 % {}"])
def test_other_braces_of_a_template_are_plain_text(tmp_path, template) -> None:
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({"classes": ["dog", "cat"], "templates": [template]}))
    before, after = template.split("{}")
    expected = [f"{before}dog{after}", f"{before}cat{after}"]
    assert read_classes(path, PHOTOS).prompts == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dog\n", "at least 2 classes, got 1"),
        ("", "'classes' is empty"),
        ("dog\ndog\n", "entry twice"),
        ("{", "not JSON"),
        ('{"names": []}', "unknown key 'names'"),
        ('{"classes": ["dog", 3]}', "expected 'classes' as a list of texts"),
        ('{"classes": ["dog", "cat"], "templates": ["a photo"]}', "{} once"),
        ('{"classes": ["dog", "cat"], "templates": ["{} {}"]}', "{} once"),
        ('{"classes": ["dog", "cat"], "labels": []}', "expected 'labels' as an object"),
        ('{"classes": ["dog", "cat"], "labels": {"i0": "cow"}}', "image 'i0': 'cow' is not one"),
        ('{"classes": ["dog", "cat"], "labels": {"i0": 3}}', "image 'i0': 3 is not one"),
        (
            '{"classes": ["dog", "cat"], "labels": {"x": "dog", "y": "cat"}}',
            "none of the 2 image ids of 'labels' is in the split 'test', whose ids are like 'i0'",
        ),
        ('{"classes": ["dog", "cat"], "classes": ["a", "b"]}', "key 'classes' stands twice"),
        (
            '{"classes": ["dog", "cat"], "labels": {"i0": "dog", "i0": "cat"}}',
            "key 'i0' stands twice",
        ),
        ("zebra\nyak\n", "no image of the split has one of the classes"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, text, problem) -> None:
    path = tmp_path / "classes.txt"
    path.write_text(text)
    with pytest.raises(DataError) as raised:
        read_classes(path, PHOTOS)
    assert problem in str(raised.value)


def test_a_file_that_is_missing_or_no_text_says_so(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot be read as text"):
        read_classes(tmp_path / "none.txt", PHOTOS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00dog")
    with pytest.raises(DataError, match="cannot be read as text"):
        read_classes(tmp_path / "bytes", PHOTOS)


def test_without_a_file_classes_are_the_things_that_captions_name() -> None:
    photos = split(*[["A dog runs."]] * 6, *[["two cats"]] * 5, *[["a zebra"]] * 2)
    (classes,) = caption_classes(photos)
    assert classes.classes == ("dog", "cat")
    assert classes.labels == (frozenset({0}),) * 6 + (frozenset({1}),) * 5 + (frozenset(),) * 2
    assert caption_classes(PHOTOS) == []


def test_classes_of_scenes_are_known_by_construction(tmp_path) -> None:
    test = load_scenes(tmp_path, images=(0, 0, 12)).test
    things, colors = classes_of(test)
    for image, truth in enumerate(test.extras):
        objects = truth["scene"]["objects"]
        assert {things.classes[k] for k in things.labels[image]} == {o["kind"] for o in objects}
        assert {colors.classes[k] for k in colors.labels[image]} == {o["colour"] for o in objects}
