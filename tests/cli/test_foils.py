"""`counterfoil foils`: one caption or a whole data set, by rule or by a model."""

from __future__ import annotations

import json

import pytest

from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.images import open_image
from counterfoil.data.text.words import words
from counterfoil.foils.files import read_foils
from counterfoil.models import create_model
from counterfoil.training.run_data import read_data
from counterfoil.training.trainer import Trainer
from tests.cli.test_cli import invoke
from tests.cli.test_correct import SCENES, run_folder

FEW = ["--masks", 2, "--samples", 3, "--keep", 2]


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    return run_folder(pairs, tmp_path_factory.mktemp("run"), ["mlm"])


def test_rules_make_one_caption_false_without_a_model() -> None:
    found = json.loads(invoke("foils", "Two men on a red bicycle.", "--json", "--keep", 3))
    assert found["caption"] == "Two men on a red bicycle."
    assert len(found["foils"]) == 3
    for foil in found["foils"]:
        assert foil["foil"] in invoke("foils", "Two men on a red bicycle.", "--keep", 3)
    assert "no foil" in invoke("foils", "so be it")


def test_a_caption_may_be_longer_than_the_name_of_a_file() -> None:
    caption = "a man on a red bicycle " + "and a dog " * 30
    assert json.loads(invoke("foils", caption, "--json"))["foils"]


def test_a_model_makes_a_caption_of_an_image_false(run, pairs, cache, tmp_path) -> None:
    split = pairs["test"]
    image, caption = split.ids[3], split.captions[3][0]
    asked = [*FEW, "--cache", cache, "--json"]
    by_id = json.loads(invoke("foils", run, image, caption, *asked))
    own = {word for text in split.captions[3] for word in words(text)}
    assert by_id["foils"]
    for foil in by_id["foils"]:
        assert {words(foil["foil"])[place] for place in foil["positions"]} - own
        assert 0 <= foil["score"] <= 1
    open_image(split.pixels[3]).save(tmp_path / "scene.png")
    by_file = invoke("foils", run, tmp_path / "scene.png", caption, *asked)
    assert json.loads(by_file)["caption"] == caption


def test_rules_write_the_captions_of_a_data_set(pairs, cache, tmp_path) -> None:
    asked = ["foils", "--data", "scenes", "--option", "images=[20,4,16]", "--split", "test"]
    asked += ["--out", tmp_path / "f.jsonl", "--kinds", "attribute,swap", "--cache", cache]
    told = json.loads(invoke(*asked, "--json"))
    found = list(read_foils(tmp_path / "f.jsonl"))
    assert told["foils"] == len(found)
    assert told["captions"] == sum(len(set(texts)) for texts in pairs["test"].captions)
    assert {foil.kind for foil in found} <= {"attribute", "swap"}
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke(*asked)
    assert f"{len(found):,} foils" in invoke(*asked, "--overwrite")


def test_a_model_writes_the_captions_of_its_own_data(run, pairs, cache, tmp_path) -> None:
    asked = ["foils", run, "--split", "dev", *FEW, "--cache", cache]
    told = json.loads(invoke(*asked, "--out", tmp_path / "a.jsonl", "--json"))
    found = list(read_foils(tmp_path / "a.jsonl"))
    assert told["foils"] == len(found) > 0
    assert {foil.image for foil in found} <= set(pairs["dev"].ids)
    single = invoke(*asked, "--out", tmp_path / "b.jsonl", "--masking", "words")
    assert "objective={hardest: 1, foils: {weight: 0.5" in " ".join(single.split())
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "b.jsonl").read_bytes()


def test_rules_take_the_captions_of_a_run(run, pairs, cache, tmp_path) -> None:
    out = tmp_path / "f.jsonl"
    invoke("foils", run, "--method", "rules", "--split", "dev", "--out", out, "--cache", cache)
    assert {foil.image for foil in read_foils(out)} <= set(pairs["dev"].ids)


@pytest.mark.slow
def test_any_matcher_trains_with_the_file(run, pairs, cache, tmp_path) -> None:
    out = tmp_path / "f.jsonl"
    invoke("foils", run, "--split", "train", *FEW, "--out", out, "--cache", cache)
    config = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 8, "text": {"word_dim": 4}},
            "data": {"min_count": 1},
            "objective": {"hardest": 1, "foils": {"weight": 0.5, "source": str(out)}},
            "train": {"epochs": 1, "batch_size": 10, "log_every": 1},
        }
    )
    model = create_model(config.model, pairs.train, config.data)
    Trainer(model, pairs, config, tmp_path / "run").run()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any("foils/accuracy" in key for key in json.loads(lines[0]))


@pytest.mark.parametrize(
    ("words_asked", "error", "message"),
    [
        (["nowhere", "--method", "model"], ConfigError, "neither a run nor a saved model"),
        (["a", "dog", "runs", "away"], ConfigError, "in quotes"),
        (["a dog", "--out", "f.jsonl"], ConfigError, "omit the caption"),
        ([__file__, "--out", "f.jsonl"], ConfigError, "not a run; name a data set with --data"),
        (["--out", "f.jsonl"], ConfigError, "name a data set"),
        (["runs/nowhere", "--out", "f.jsonl"], ConfigError, "'runs/nowhere' is not a run"),
        ([" "], ConfigError, "empty"),
        (["dog " * 201], ConfigError, "201 words, at most 200"),
        ([], ConfigError, "--out"),
        (["a dog", "--kinds", "nuon"], ConfigError, "did you mean 'noun'"),
        (["a dog", "--masking", "words"], ConfigError, "--masking: no effect, because rules"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(words_asked, error, message) -> None:
    with pytest.raises(error, match=message):
        invoke("foils", *words_asked)


def test_a_model_does_not_choose_among_kinds_of_rules(run) -> None:
    with pytest.raises(ConfigError, match="--kinds: no effect, because a model writes"):
        invoke("foils", run, "photo.png", "a dog", "--kinds", "noun")


def test_a_model_that_cannot_write_is_refused(pairs, tmp_path, cache) -> None:
    plain = run_folder(pairs, tmp_path / "plain", [])
    with pytest.raises(ConfigError, match=r"extras=\[mlm\]"):
        invoke("foils", plain, "--out", tmp_path / "f.jsonl", "--cache", cache)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        invoke("foils", tmp_path / "begun", "--out", tmp_path / "f.jsonl", "--cache", cache)


def test_an_unknown_split_is_named(run, cache, tmp_path) -> None:
    with pytest.raises(DataError, match="no split 'tset'"):
        invoke("foils", run, "--split", "tset", "--out", tmp_path / "f", "--cache", cache)
