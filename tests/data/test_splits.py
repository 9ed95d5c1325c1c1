"""A dev split for data without one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.formats.base import HASHED, hashed_splits, normalized_split
from counterfoil.data.images import FileImage
from counterfoil.data.pairs import Pairs, Problem, Severity, Split
from counterfoil.data.splits import (
    choose_dev,
    read_dev_split,
    save_dev_split,
    undivided,
    with_dev_split,
)


def data(ids: list[str], **others: list[str]) -> Pairs:
    splits = {
        name: Split(name, images, [[f"{one} first", f"{one} second"] for one in images])
        for name, images in {"train": ids, **others}.items()
    }
    return Pairs("photos", splits)


def names(count: int) -> list[str]:
    return [f"photo-{number}" for number in range(count)]


def test_images_without_stated_splits_can_be_read_as_one_split() -> None:
    pixels = [FileImage(Path(f"{number}.png")) for number in range(4)]
    train = Split("train", ["a", "b"], [["one"], ["two", "three"]], pixels[:2])
    test = Split("test", ["c", "d"], [["four"], []], pixels[2:], extras=[{"x": 1}, {}])
    hashed = Problem(HASHED, Severity.NOTE, "captions.csv", "no split is stated")
    other = Problem("empty-caption", Severity.SKIP, "captions.csv:2", "no text")
    pairs = Pairs("photos", {"train": train, "test": test}, [hashed, other])
    whole = undivided(pairs)
    assert whole.problems == [other]
    (split,) = whole
    assert (split.name, list(split.ids)) == ("all", ["a", "b", "c", "d"])
    assert split.texts == ["one", "two", "three", "four"]
    assert list(split.pixels) == pixels
    assert list(split.extras) == [{}, {}, {"x": 1}, {}]
    for stated in (
        replace(pairs, problems=[other]),
        replace(pairs, splits={"train": train, "test": replace(test, pixels=None)}),
    ):
        assert undivided(stated) is stated
    (few,) = undivided(replace(pairs, splits={"train": train}))  # too few for a dev or test split
    assert (few.name, list(few.ids)) == ("all", ["a", "b"])


def test_about_five_percent_are_set_aside_with_all_their_captions() -> None:
    pairs = with_dev_split(data(names(2000), test=["t"]), 0.05)
    assert list(pairs.splits) == ["train", "dev", "test"]
    assert 60 <= len(pairs.dev) <= 140
    assert sorted([*pairs.train.ids, *pairs.dev.ids]) == sorted(names(2000))
    for image, captions in zip(pairs.dev.ids, pairs.dev.captions, strict=True):
        assert captions == [f"{image} first", f"{image} second"]


def test_the_same_images_are_set_aside_after_rows_were_reordered_or_added() -> None:
    ids = names(600)
    before = set(with_dev_split(data(ids), 0.05).dev.ids)
    mixed = random.Random(1).sample(ids, len(ids))
    assert set(with_dev_split(data(mixed), 0.05).dev.ids) == before
    after = set(with_dev_split(data(names(900)), 0.05).dev.ids)
    assert after & set(ids) == before


@pytest.mark.parametrize(("images", "least"), [(2, 1), (4, 1), (12, 2), (50, 10), (150, 10)])
def test_small_sets_set_enough_images_aside_and_keep_most(images: int, least: int) -> None:
    chosen = choose_dev(names(images), 0.05)
    assert least <= len(chosen) <= max(least, images // 5)
    assert len(choose_dev(names(images), 0.999)) < images


def test_a_dev_split_of_the_data_is_taken_under_any_of_its_names() -> None:
    for name in ("dev", "val", "validation"):
        pairs = data(names(20), **{name: ["v"]})
        assert with_dev_split(pairs, 0.05) is pairs
    assert with_dev_split(data(names(20)), 0.0).splits.keys() == {"train"}


@pytest.mark.parametrize("share", [-0.1, 1.0, 2, float("nan"), "x"])
def test_a_share_that_is_none_is_refused(share) -> None:
    with pytest.raises(ConfigError, match="dev_share: expected a number from 0 to below 1"):
        with_dev_split(data(names(20)), share)


def test_one_image_cannot_be_divided() -> None:
    with pytest.raises(DataError, match="at least two are needed"):
        with_dev_split(data(["only"]), 0.05)


def test_what_a_run_has_set_aside_is_set_aside_again(tmp_path) -> None:
    pairs = with_dev_split(data(names(12)), 0.05)
    save_dev_split(tmp_path, pairs, 0.05)
    saved = read_dev_split(tmp_path)
    assert saved == list(pairs.dev.ids)
    grown = data([f"new-{number}" for number in range(200)] + names(12))
    assert list(with_dev_split(grown, 0.05, saved).dev.ids) == saved
    other = data([f"other-{number}" for number in range(40)])
    assert with_dev_split(other, 0.0, saved) is other


def test_a_damaged_list_of_dev_images_is_an_error(tmp_path) -> None:
    (tmp_path / "dev_split.json").write_text('{"ids": 3}')
    with pytest.raises(DataError, match="expected a list of image ids"):
        read_dev_split(tmp_path)


@pytest.mark.parametrize("images", [3, 5, 12, 24, 100])
def test_a_set_without_splits_has_images_in_each_of_the_three(images: int) -> None:
    for prefix in ("a", "b", "c", "d", "e"):
        splits = hashed_splits([f"{prefix}{number}" for number in range(images)])
        counts = {name: splits.count(name) for name in ("train", "dev", "test")}
        assert min(counts.values()) >= 1, counts
        assert counts["train"] == max(counts.values())


@pytest.mark.parametrize("images", [1, 2])
def test_one_or_two_images_without_splits_are_all_for_training(images: int) -> None:
    for prefix in ("a", "b", "c", "d", "e", "f", "g", "h"):
        assert (
            hashed_splits([f"{prefix}{number}" for number in range(images)]) == ["train"] * images
        )


def test_usual_spellings_of_splits_are_understood() -> None:
    spellings = ["Train", "TRAINING", "val", "Validation", "Test ", "testing", "fold 1"]
    understood = ["train", "train", "val", "validation", "test", "test", "fold 1"]
    assert [normalized_split(name) for name in spellings] == understood


def test_fragments_and_pixels_stay_with_their_images() -> None:
    pairs = data(names(30))
    extras = [{"place": image} for image in names(30)]
    train = replace(pairs.train, extras=extras)
    divided = with_dev_split(replace(pairs, splits={"train": train}), 0.05)
    for split in divided:
        assert split.extras is not None
        assert [one["place"] for one in split.extras] == list(split.ids)
