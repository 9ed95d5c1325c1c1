"""Foils that travel with captions: by rule, or from a file that is matched with care."""

from __future__ import annotations

import json
import pickle
import random

import numpy as np
import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.core.zoo import resolve
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import words
from counterfoil.foils.files import foils_of_image
from counterfoil.foils.rules import CaptionSites
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.extra_negatives import foil_negatives
from counterfoil.training.run import execute
from counterfoil.training.run_data import TrainingBatches
from counterfoil.training.services import TrainingRunSetup
from tests.conftest import make_split

SPLIT = Split(
    "train",
    ["7", "dog.jpg"],
    [
        ["a man rides two horses", "a cat beside a man"],
        ["a dog runs on a beach", "three dogs", "a dog runs on a beach"],
    ],
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def foils(source, count: int = 1):
    return foil_negatives(str(source), count, SPLIT, Silent())


def written(tmp_path, *records) -> str:
    path = tmp_path / "foils.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return str(path)


def test_rules_give_as_many_different_foils_as_asked_for_and_none_is_a_caption() -> None:
    for count in (1, 3):
        made = foils("rules", count).of(0, generator())
        assert made.images == ()
        assert len(set(made.texts)) == count
        assert "a man rides two horses" not in made.texts


def test_rules_never_bring_in_a_word_of_the_images_other_captions() -> None:
    for seed in range(30):
        for text in foils("rules:noun", 4).of(0, generator(seed)).texts:
            assert not ({"cat", "beside"} & set(words(text)))


def test_the_draw_depends_on_the_generator_alone() -> None:
    rules = foils("rules")
    again = pickle.loads(pickle.dumps(rules))  # noqa: S301
    drawn = [rules.of(0, generator(seed)) for seed in range(12)]
    assert drawn == [again.of(0, generator(seed)) for seed in range(12)]
    assert len(set(drawn)) > 1


def test_sites_are_found_once_and_draws_are_those_of_a_caption_seen_anew(monkeypatch) -> None:
    rules, searched = foils("rules:noun,numeral,word-swap", 2), []
    find = CaptionSites.of
    monkeypatch.setattr(CaptionSites, "of", lambda *given: searched.append(given) or find(*given))
    for seed in range(5):
        for caption in range(len(SPLIT.texts)):
            own = SPLIT.captions[int(SPLIT.image_of[caption])]
            rng = random.Random(int(generator(seed).integers(1 << 62)))
            anew = foils_of_image(SPLIT.texts[caption], own, rng, rules.kinds, 2)
            searched.clear()
            assert rules.of(caption, generator(seed)).texts == tuple(foil.text for foil in anew)
            assert len(searched) == (seed == 0)


@pytest.mark.parametrize(("objective", "lasts"), [("foils", True), ("triplet-clip", False)])
def test_loading_processes_last_unless_the_extra_items_change(tmp_path, objective, lasts) -> None:
    train, device = make_split(tmp_path, "train", 24, 0), torch.device("cpu")
    options = {"images": "retrieved"} if objective == "triplet-clip" else {}
    config = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 8},
            "data": {"min_count": 1, "workers": 1},
            "objective": {objective: {"source": "rules:noun,word-swap", **options}},
        }
    )
    model = create_model(config.model, train, config.data)
    term = create_objective(config.objective)
    term.prepare(TrainingRunSetup(train, model, config, device, Silent()))
    batches = TrainingBatches(train, model, term, config, device, Silent())
    assert batches.loader(0, 0).persistent_workers == lasts


def test_the_kinds_of_rules_may_be_chosen() -> None:
    for seed in range(10):
        assert foils("rules:numeral").of(3, generator(seed)).texts[0].endswith("s")
    with pytest.raises(ConfigError, match="unknown kind 'nuon'; did you mean 'noun'"):
        foils("rules:nuon")


def test_a_file_is_matched_by_image_and_caption_text_or_number(tmp_path) -> None:
    path = written(
        tmp_path,
        {"image": 7, "caption": "a cat beside a man", "foil": "a dog beside a man", "kind": "x"},
        "",
        {"image": "dog.jpg", "caption": 1, "foil": "four dogs"},
        {"image": "dog.jpg", "caption": "a dog runs on a beach", "foil": "a cat runs on a beach"},
        {"image": "elsewhere", "caption": "three dogs", "foil": "two dogs"},
        {"image": "dog.jpg", "caption": 99, "foil": "two dogs"},
        {"image": "dog.jpg", "caption": 0, "foil": "three dogs"},
    )
    listed = pickle.loads(pickle.dumps(foils(path)))  # noqa: S301
    texts = [listed.of(caption, generator()).texts for caption in range(5)]
    cat = ("a cat runs on a beach",)  # of both captions with this text; "three dogs" is true
    assert texts == [(), ("a dog beside a man",), cat, ("four dogs",), cat]


def test_of_many_listed_foils_some_are_drawn(tmp_path) -> None:
    lines = [{"image": "7", "caption": 0, "foil": f"foil {n}"} for n in range(6)]
    listed = foils(written(tmp_path, *lines, lines[0]), count=2)
    drawn = [listed.of(0, generator(seed)).texts for seed in range(40)]
    assert all(len(set(texts)) == 2 for texts in drawn)
    assert {text for texts in drawn for text in texts} == {f"foil {n}" for n in range(6)}
    whole = foils(written(tmp_path, *lines, lines[0]), count=9).of(0, generator()).texts
    assert sorted(whole) == [f"foil {n}" for n in range(6)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"foils\.jsonl, line 2: not JSON"),
        (b"\xff\xfe", r"line 2: not JSON"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"image": "7", "foil": "x"}', "line 2: expected 'caption' as text or a whole number"),
        ('{"image": "7", "caption": true, "foil": "x"}', "expected 'caption'.*got True"),
        ('{"image": null, "caption": 0, "foil": "x"}', "expected 'image'"),
        ('{"image": "7", "caption": 0, "foil": 3}', "expected 'foil' as text, got 3"),
        ('{"image": "7", "caption": 0, "foil": "  "}', "the foil is empty"),
        ('{"image": "7", "caption": -1, "foil": "x"}', "counts from 0, got -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message) -> None:
    path = tmp_path / "foils.jsonl"
    good = b'{"image": "7", "caption": 0, "foil": "x"}\n'
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(DataError, match=message):
        foils(path)


def test_a_file_that_matches_nothing_is_refused(tmp_path) -> None:
    path = written(tmp_path, {"image": "8", "caption": 0, "foil": "x"})
    with pytest.raises(DataError, match=r"no line matches a caption of split 'train'.*is '7'"):
        foils(path)


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"'.*none\.jsonl' is neither 'rules' nor a file"):
        foils(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="count of at least 1, got 0"):
        foils("rules", count=0)


@pytest.mark.slow
def test_a_pretrained_model_writes_foils_by_its_name_as_by_its_folder(tmp_path) -> None:
    def written(source: str, name: str) -> str:
        config = {
            "data": {"source": "scenes", "options": {"images": [6, 4, 4]}, "min_count": 1},
            "model": {"name": "vse-fc", "embed_size": 8},
            "objective": {"hardest": {}, "foils": {"source": source}},
            "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
            "evaluation": {"bootstrap": 0},
        }
        execute(build_config(config), tmp_path / name, tmp_path / f"{name}-cache")
        (file,) = (tmp_path / f"{name}-cache" / "model-foils").glob("scenes-corrector-train-*")
        return file.read_text()

    by_name = written("scenes-corrector", "by-name")
    assert by_name == written(str(resolve("scenes-corrector")), "by-folder")
    lines = [json.loads(line) for line in by_name.splitlines()]
    assert {line["image"] for line in lines} <= {f"scene-train-{i:06}" for i in range(6)}
    assert all(line["foil"] != line["caption"] for line in lines)
    assert len(lines) > 15
