"""Foils of a whole data set by rule: what is drawn, what is counted, what a kill costs."""

from __future__ import annotations

import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import words
from counterfoil.foils.files import (
    FoilCounts,
    captions_of,
    read_foils,
    write_rule_foils,
)
from counterfoil.training.extra_negatives import foil_negatives

SPLIT = Split(
    "train",
    ["7", "dog.jpg", "empty"],
    [
        ["A man rides two horses.", "a cat beside a man"],
        ["a dog runs on a beach", "so be it", "a dog runs on a beach"],
        [],
    ],
)


class Killed(Exception):
    pass


class Impatient(Silent):
    """Kills after some captions."""

    def __init__(self, after: int) -> None:
        self.after = after

    def track(self, items, description, total=None, done=0):
        for number, item in enumerate(items):
            if number == self.after:
                raise Killed
            yield item


def test_every_caption_gets_foils_and_what_has_none_is_counted(tmp_path) -> None:
    counts = write_rule_foils(SPLIT, tmp_path / "f.jsonl", count=3)
    result = list(read_foils(tmp_path / "f.jsonl"))
    assert counts == FoilCounts(captions=4, foils=9, without=1)
    assert [foil.caption_id for foil in result] == ["7#0"] * 3 + ["7#1"] * 3 + ["dog.jpg#0"] * 3
    for foil in result:
        old, new = words(foil.caption), words(foil.foil)
        assert tuple(p for p in range(len(old)) if old[p] != new[p]) == foil.positions
        own = {word for text in SPLIT.captions[SPLIT.ids.index(foil.image)] for word in words(text)}
        articles = {"a", "an"}
        assert {new[p] for p in foil.positions} - articles - own


@pytest.mark.parametrize("after", [0, 1, 3])
def test_killed_and_started_again_it_writes_the_same_bytes(tmp_path, after) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write_rule_foils(SPLIT, whole, seed=3)
    with pytest.raises(Killed):
        write_rule_foils(SPLIT, cut, seed=3, progress=Impatient(after))
    assert not cut.exists()
    assert write_rule_foils(SPLIT, cut, seed=3) == write_rule_foils(SPLIT, whole, seed=3)
    assert cut.read_bytes() == whole.read_bytes()


def test_a_file_is_not_ended_with_other_settings_or_captions(tmp_path) -> None:
    path = tmp_path / "f.jsonl"
    with pytest.raises(Killed):
        write_rule_foils(SPLIT, path, progress=Impatient(1))
    other = Split("train", SPLIT.ids, [["a cat"], ["a dog"], ["a bus"]])
    with pytest.raises(DataError, match="other settings"):
        write_rule_foils(SPLIT, path, seed=1)
    with pytest.raises(DataError, match="other settings"):
        write_rule_foils(other, path)


def test_draws_depend_on_the_seed_and_not_on_the_other_captions(tmp_path) -> None:
    alone = Split("train", SPLIT.ids[:1], SPLIT.captions[:1])
    write_rule_foils(SPLIT, tmp_path / "all", seed=5)
    write_rule_foils(alone, tmp_path / "alone", seed=5)
    write_rule_foils(alone, tmp_path / "other", seed=6)
    assert (tmp_path / "all").read_bytes().startswith((tmp_path / "alone").read_bytes())
    assert (tmp_path / "alone").read_bytes() != (tmp_path / "other").read_bytes()


def test_an_unknown_kind_is_refused_before_anything_is_written(tmp_path) -> None:
    with pytest.raises(ConfigError, match="unknown kind 'nuon'"):
        write_rule_foils(SPLIT, tmp_path / "f.jsonl", kinds=["nuon"])
    assert not list(tmp_path.iterdir())


def test_training_finds_the_foils_of_each_caption(tmp_path) -> None:
    write_rule_foils(SPLIT, tmp_path / "f.jsonl", count=2)
    companions = foil_negatives(str(tmp_path / "f.jsonl"), 2, SPLIT, Silent())
    assert sorted(companions.foils) == [0, 1, 2, 4]  # the beach twice, as the data has it


def test_a_caption_that_an_image_has_twice_is_one(tmp_path) -> None:
    assert [one.id for one in captions_of(SPLIT)] == ["7#0", "7#1", "dog.jpg#0", "dog.jpg#1"]


def test_the_digest_of_a_split_sees_where_captions_belong() -> None:
    moved = Split("train", ["a", "b"], [["x"], ["y", "z"]])
    before = Split("train", ["a", "b"], [["x", "y"], ["z"]])
    assert moved.digest != before.digest
    assert moved.digest == Split("dev", ["a", "b"], [["x"], ["y", "z"]]).digest
