"""`counterfoil correct`: the words, the sentence before and after, and what is refused."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.core.progress import Silent
from counterfoil.data.images import open_image
from counterfoil.models import create_model, save_pretrained
from counterfoil.models.correct import Change, Correction, SuspectWord
from counterfoil.plots.sentences import GROUND, color_of, correct_png
from counterfoil.training.run import save_rule
from counterfoil.training.run_data import read_data
from counterfoil.training.run_folder import load_model, load_rule
from tests.cli.test_cli import invoke

SCENES = {"source": "scenes", "options": {"images": [20, 4, 16]}, "min_count": 1}
SENTENCE = "A man on a red bicycle, next to a tree."


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


def run_folder(pairs, folder, heads: list[str]):
    """An untrained run, complete on disk."""
    matcher = {"layers": 1, "heads": 2, "extras": heads}
    section = {"name": "uniter-small", "embed_size": 16, "matcher": matcher}
    config = build_config({"data": SCENES, "model": section})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.fragments_from = "segments"
    save_pretrained(model, folder / "best")
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    return run_folder(pairs, tmp_path_factory.mktemp("run"), ["discrimination", "correction"])


def test_a_sentence_about_an_image_of_the_data_is_corrected(run, pairs, cache) -> None:
    asked = ["correct", run, pairs["test"].ids[3], SENTENCE, "--threshold", 0, "--cache", cache]
    shown = " ".join(invoke(*asked).split())
    told = json.loads(invoke(*asked, "--json"))
    assert told["text"] == SENTENCE
    assert told["corrected_score"] >= told["score"]
    assert told["corrected"] in shown
    assert f"{told['score']:.4f}" in shown
    assert [word["word"] for word in told["words"]][:3] == ["A", "man", "on"]
    assert told["changes"] or told["refused"]
    for change in told["refused"]:
        assert f"'{change['instead']}'" in shown


def test_an_image_file_is_read_as_the_run_reads_images(run, pairs, cache, tmp_path) -> None:
    path = tmp_path / "scene.png"
    open_image(pairs["test"].pixels[3]).save(path)
    by_file = json.loads(invoke("correct", run, path, SENTENCE, "--json"))
    by_id = invoke("correct", run, pairs["test"].ids[3], SENTENCE, "--cache", cache, "--json")
    assert by_file["score"] == pytest.approx(json.loads(by_id)["score"], abs=1e-3)


def test_a_model_without_the_heads_is_refused(pairs, tmp_path, cache) -> None:
    plain, image = run_folder(pairs, tmp_path, []), pairs["test"].ids[0]
    with pytest.raises(ConfigError, match="tags-dc"):
        invoke("correct", plain, image, SENTENCE, "--cache", cache)
    with pytest.raises(ConfigError, match="empty"):
        invoke("correct", plain, image, " ")


def test_a_correction_is_drawn(run, pairs, cache, tmp_path) -> None:
    path, image = tmp_path / "right.png", pairs["test"].ids[3]
    said = invoke("correct", run, image, SENTENCE, "--cache", cache, "--out", path)
    assert "right.png" in said.replace("\n", "")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        width, height = picture.size
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 20)}
    assert (width, height > width / 2) == (960, True)
    assert len(colors) > 100  # the scene is on it
    with pytest.raises(ConfigError, match="PNG"):
        invoke("correct", run, image, SENTENCE, "--cache", cache, "--out", tmp_path / "right.jpg")


def correction(*changes: Change) -> Correction:
    words = (
        SuspectWord("a", (0, 1), 0.02, ()),
        SuspectWord("red", (2, 5), 0.9, ("blue",)),
        SuspectWord("car", (6, 9), 0.1, ()),
    )
    return Correction("a red car", 0.25, "a blue car", 0.75, words, changes, ())


def test_the_words_that_were_changed_are_green_and_those_that_are_wrong_red() -> None:
    drawn = correct_png(correction(Change(1, "red", "blue", 0.75)))
    unchanged = correct_png(correction())
    for data, green in ((drawn, True), (unchanged, False)):
        page = Image.open(io.BytesIO(data)).convert("RGB")
        colors = {color for _, color in page.getcolors(1 << 20)}
        assert color_of(-0.9, GROUND) in colors
        assert (color_of(1.0, GROUND) in colors) == green


@pytest.mark.slow
def test_corrections_are_measured_and_the_rule_is_chosen_again(run, cache) -> None:
    asked = ["correct", run, "--measure", "--max-captions", 10, "--cache", cache]
    told = json.loads(invoke(*asked, "--margin", 0, "--threshold", 0, "--json"))
    assert told["exchanged"] == 10
    assert 0 <= told["none_made"] <= 1
    shown = invoke(*asked)
    assert "no change made" in shown
    assert "as they are" in shown
    invoke("correct", run, "--choose", "--max-captions", 5, "--cache", cache)
    rule = json.loads((run / "correction_rule.json").read_text())
    assert set(rule) >= {"threshold", "margin", "candidates", "usable", "precision", "made"}
    (run / "correction_rule.json").unlink()


@pytest.mark.parametrize(
    "text",
    ['{"threshold": 7}', '{"usable": "no"}', '{"candidates": 1e9}', '{"margin": 1e999}',
     '{"margin": NaN}', '{"margin": ' + "9" * 400 + "}", '{"precision": "x", "made": 1}',
     '{"more": 1}', "[0.5, 0.1]", "[" * 20_000, "null", "{", " " * 70_000],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_a_damaged_rule_is_named(run, text) -> None:
    (run / "correction_rule.json").write_text(text)
    try:
        with pytest.raises(CheckpointError, match=r"correction_rule\.json: damaged .*--choose"):
            load_rule(run)
    finally:
        (run / "correction_rule.json").unlink()


def test_a_margin_that_is_no_number_is_refused_before_any_work(run) -> None:
    for margin in ("nan", "inf", "-0.1"):
        result = CliRunner().invoke(app, ["correct", str(run), "--measure", "--margin", margin])
        assert result.exit_code == 2
    result = CliRunner().invoke(app, ["correct", str(run), "--measure", "--candidates", "101"])
    assert result.exit_code == 2


def test_a_rule_is_chosen_without_a_test_split_and_as_json(run, cache) -> None:
    chosen = json.loads(invoke("correct", run, "--choose", "--cache", cache, "--json"))["rule"]
    saved = run / "correction_rule.json"
    assert chosen == json.loads(saved.read_text())
    saved.unlink()
    with pytest.raises(ConfigError, match="leave out"):
        invoke("correct", run, "--choose", "--margin", 0.1)


def test_a_run_whose_dev_captions_have_no_foil_suggests_nothing(run, pairs, cache) -> None:
    """No margin could be chosen, so none is known to be enough; an older rule is not left there."""
    dev = replace(pairs["dev"], captions=[["hm"]] * len(pairs["dev"]))
    (run / "correction_rule.json").write_text("{}")
    rule = save_rule(run, load_model(run, "cpu"), dev, Silent())
    try:
        assert (rule.usable, rule.made) == (False, None)
        assert load_rule(run) == rule
        shown = invoke("correct", run, pairs["test"].ids[3], SENTENCE, "--cache", cache)
        assert "nothing was changed" in shown
        assert "no margin could be chosen on dev" in " ".join(shown.split())
        assert "looks wrong" not in shown
    finally:
        (run / "correction_rule.json").unlink()


def test_to_measure_takes_no_sentence_and_to_correct_needs_one(run) -> None:
    with pytest.raises(ConfigError, match="take no image"):
        invoke("correct", run, "a.png", "a dog", "--measure")
    with pytest.raises(ConfigError, match="expected an image and a sentence"):
        invoke("correct", run)
