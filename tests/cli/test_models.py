"""`counterfoil models --pretrained`, and pretrained models where a command takes a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core import zoo
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.models import from_pretrained


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def scene(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    picture = Image.new("RGB", (96, 96), "white")
    picture.paste((200, 30, 30), (20, 30, 60, 70))
    picture.save("scene.png")
    return Path("scene.png")


def test_the_zoo_is_listed_with_size_whereabouts_and_results() -> None:
    lines = call("models", "--pretrained").splitlines()
    for name, entry in zoo.entries().items():
        (line,) = [one for one in lines if one.startswith(f"{name} ")]
        expected = (zoo.size_text(entry.size), "shipped", entry.summary, entry.trained_on)
        assert all(text in line for text in expected)
        assert all(result.name in line for result in entry.results)


def test_the_zoo_fits_a_terminal_of_100_columns(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    text = re.sub(r"\x1b\[[0-9;]*m", "", call("models", "--pretrained"))
    assert "shipped" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


def test_a_pattern_selects_and_json_has_every_field() -> None:
    listed = json.loads(call("models", "--pretrained", "scenes-*", "--json"))
    assert sorted(listed) == zoo.names("scenes-*")
    one = listed["scenes-naaf"]
    assert one["where"] == "shipped"
    assert one["size"] == zoo.entries()["scenes-naaf"].size
    assert one["files"]["config.json"].keys() == {"sha256", "size"}


def test_a_name_shows_its_card() -> None:
    card = (zoo.FOLDER / "scenes-naaf" / zoo.CARD).read_text(encoding="utf-8")
    assert call("models", "--pretrained", "scenes-naaf").strip() in card


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'scene-naaf': no such .* did you mean 'scenes-naaf'"):
        call("models", "--pretrained", "scene-naaf")
    with pytest.raises(ConfigError, match="leave it out with --pretrained"):
        call("models", "--pretrained", "--kind", "models")


def test_commands_take_a_pretrained_model_in_place_of_a_run(scene) -> None:
    scored = json.loads(call("score", "scenes-naaf", scene, "-t", "a red car", "--json"))
    assert scored
    words = json.loads(call("explain", "scenes-naaf", scene, "a red car", "--json"))["words"]
    assert [word["word"] for word in words] == ["a", "red", "car"]
    corrected = json.loads(call("correct", "scenes-corrector", scene, "a red car", "--json"))
    assert corrected["text"] == "a red car"


@pytest.mark.slow
def test_a_pretrained_model_starts_another_training(scene) -> None:
    vocabulary = zoo.FOLDER / "scenes-corrector" / "vocabulary.json"
    call(
        "train", "scenes/tags-dc-one-stage", "model.init_from=scenes-corrector",
        f"data.vocabulary={vocabulary}", "data.options.images=[8,4,4]", "train.epochs=1",
        "train.batch_size=8", "data.captions=one", "evaluation.max_images=4", "--out", "run",
        "--cache", "cache",
    )  # fmt: skip
    assert "init_from: scenes-corrector" in Path("run/config.yaml").read_text()


@pytest.mark.parametrize("source", ["scenes-naaf", "copy", "run/best"])
def test_an_index_is_not_written_into_a_saved_model(scene, source) -> None:
    if source != "scenes-naaf":
        shutil.copytree(zoo.FOLDER / "scenes-naaf", source)
    for out in [(), ("--out", zoo.resolve(source) / "a" / "index")]:
        with pytest.raises(ConfigError, match=r"a saved model, .*; name another folder with --out"):
            call("index", source, "scenes", "--option", "images=[2,2,2]", *out, "--cache", "cache")
    from_pretrained(source)  # refuses files that were added


@pytest.mark.slow
def test_an_index_of_a_run_is_written_into_it_and_of_a_saved_model_elsewhere(scene) -> None:
    shutil.copytree(zoo.FOLDER / "scenes-naaf", "run/best")
    data = ("scenes", "--option", "images=[2,2,2]", "--cache", "cache")
    call("index", "run", *data)
    call("index", "scenes-naaf", *data, "--out", "elsewhere")
    assert Path("run/index/index.json").is_file()
    assert Path("elsewhere/index.json").is_file()


def test_an_unknown_model_is_refused_with_suggestions(scene) -> None:
    with pytest.raises(CheckpointError, match="did you mean 'scenes-corrector'"):
        call("score", "scenes-corector", scene, "-t", "a red car")
