"""`counterfoil explain`, and `evaluate` with words and runs side by side."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from PIL import Image

from counterfoil.cli.explain import colored
from counterfoil.cli.inputs import DataChoice
from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.images import open_image
from counterfoil.models import create_model, from_pretrained, save_pretrained
from counterfoil.training.run_data import read_data
from tests.cli.test_cli import invoke

SCENES = {"source": "scenes", "options": {"images": [20, 4, 16]}, "min_count": 1}
SENTENCE = "A man on a red bicycle, next to a tree."


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


@pytest.fixture(scope="module")
def runs(cache, pairs, tmp_path_factory):
    """Untrained runs, complete on disk."""
    folders = {}
    for name in ("naaf", "vse-fc"):
        folders[name] = tmp_path_factory.mktemp("runs") / f"my-{name}"
        section = {"name": name, "embed_size": 16, "text": {"word_dim": 8}}
        config = build_config({"data": SCENES, "model": section})
        torch.manual_seed(0)
        model = create_model(config.model, pairs.train, config.data)
        model.fragments_from = "segments"
        save_pretrained(model, folders[name] / "best")
        (folders[name] / "config.yaml").write_text(config.to_yaml())
    return folders


def test_an_explanation_prints_words_score_and_boundary_and_draws(runs, cache, tmp_path) -> None:
    out = tmp_path / "why.png"
    image = "scene-test-000003"
    text = invoke("explain", runs["naaf"], image, SENTENCE, "--cache", cache, "--out", out)
    assert SENTENCE in text
    for part in ("bicycle", "<start>", "effect", "positive", "negative", "score", "boundary"):
        assert part in text
    assert "Effects add up to the score" in text
    assert Image.open(out).width == 960


def test_an_emoji_is_named_once_among_the_words_left_out(runs, cache, tmp_path) -> None:
    emoji, sentence = "\U0001f44d\U0001f3fd", "A man \U0001f44d\U0001f3fd! on a red zorp bicycle"
    command = ("explain", runs["naaf"], "scene-test-000003", sentence, "--cache", cache)
    text = invoke(*command, "--out", tmp_path / "why.png")
    assert f"unknown words, left out: {emoji}, zorp\n" in text
    assert sum("not in vocabulary" in line for line in text.splitlines()) == 3  # with the mark
    tree = json.loads(invoke(*command, "--json"))
    assert tree["unknown"] == [emoji, "zorp"]
    plain = ("A man on a red bicycle", *command[4:], "--json")
    assert json.loads(invoke(*command[:3], *plain))["score"] == pytest.approx(
        tree["score"], abs=1e-6
    )


def test_an_image_file_and_its_id_are_explained_alike(runs, cache, pairs, tmp_path) -> None:
    path = tmp_path / "scene.png"
    open_image(pairs.test.pixels[2]).save(path)
    by_file, by_id = (
        json.loads(invoke("explain", runs["naaf"], image, SENTENCE, "--json", "--cache", cache))
        for image in (path, pairs.test.ids[2])
    )
    assert by_file["score"] == pytest.approx(by_id["score"], abs=1e-3)  # ids are read as float16
    assert (by_file["method"], by_file["additive"]) == ("parts", True)
    every = by_file["words"] + by_file["specials"]
    assert sum(word["effect"] for word in every) == pytest.approx(by_file["score"], abs=1e-6)
    assert len(by_file["boxes"]) == len(every[0]["region_weights"])


@pytest.mark.parametrize("many", [True, False])
def test_the_printed_sentence_is_green_for_and_red_against(runs, pairs, many) -> None:
    model = from_pretrained(runs["naaf"] / "best")
    match = model.explain(pairs.test.fragments.read(0), "a dog")
    effects = zip(match.words, (0.2, -0.2), strict=True)
    words = [replace(word, effect=effect, known=True) for word, effect in effects]
    first, second = colored(replace(match, words=words), many).spans
    assert (first.start, first.end, second.start, second.end) == (0, 1, 2, 5)
    good, bad = (span.style.bgcolor.get_truecolor() for span in (first, second))
    assert good.green > good.red
    assert bad.red > bad.green


def test_leave_one_out_is_called_so(runs, cache) -> None:
    text = invoke("explain", runs["vse-fc"], "scene-dev-000001", SENTENCE, "--cache", cache)
    assert "leave-one-out" in text
    assert "boundary" not in text


@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        ("missing.png", [], "neither an image file nor an id .*ids look like 'scene-train-000000'"),
        ("scene-tst-000003", [], "did you mean 'scene-test-000003'"),
        ("scene-test-000003", ["--split", "dev"], "splits: dev"),
        (".", [], "a folder"),
    ],
)
def test_an_image_that_is_not_there_is_named(runs, cache, image, options, message) -> None:
    with pytest.raises(DataError, match=message):
        invoke("explain", runs["naaf"], image, SENTENCE, "--cache", cache, *options)


def test_a_pipe_is_no_image_file(runs, cache, tmp_path) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="not a regular file"):
        invoke("explain", runs["naaf"], pipe, SENTENCE, "--cache", cache)


def test_a_model_without_a_run_needs_a_file_or_data(runs, cache) -> None:
    model = runs["naaf"] / "best"
    with pytest.raises(DataError, match=r"no such image file.*--data"):
        invoke("explain", model, "missing.png", SENTENCE)
    options = ["--data", "scenes", "--option", "images=[20,4,16]", "--cache", cache]
    assert "score" in invoke("explain", model, "scene-test-000003", SENTENCE, *options)


def test_an_empty_sentence_and_a_picture_of_another_kind_are_refused(runs, cache) -> None:
    with pytest.raises(ConfigError, match="the sentence is empty"):
        invoke("explain", runs["naaf"], "scene-test-000003", " ", "--cache", cache)
    with pytest.raises(ConfigError, match="PNG"):
        invoke("explain", runs["naaf"], "scene-test-000003", "a", "-o", "why.jpg", "--cache", cache)


@pytest.mark.parametrize(
    ("sentence", "message"),
    [("dog " * 10_000, "40,000 letters"), ("a " * 1000, "1,000 words, at most 200")],
)
@pytest.mark.parametrize("command", ["explain", "correct"])
def test_a_sentence_that_would_take_hours_is_refused_at_once(command, sentence, message) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke(command, "scenes-naaf", "scene-test-000003", sentence)


def test_a_saved_model_reads_a_file_as_it_was_trained_to(pairs, cache, tmp_path) -> None:
    """With its own options of the extractor, even where its run is not beside it."""
    model = create_model(build_config({"model": {"name": "vse-fc"}}).model, pairs.train)
    model.fragments_from, model.fragments_options = "segments", {"max_fragments": 2}
    save_pretrained(model, tmp_path / "model")
    open_image(pairs.test.pixels[3]).save(tmp_path / "scene.png")
    source = DataChoice(None, None, [], cache, quiet=True)
    fragments, *_ = source.read_image(tmp_path / "model", model, str(tmp_path / "scene.png"))
    assert len(fragments.features) == 2 < len(pairs.test.fragments.read(3).features)


QUICK = ["--words", "--max-captions", 20, "--bootstrap", 20]


@pytest.mark.slow
def test_evaluating_words_adds_a_report(runs, cache) -> None:
    options = [runs["naaf"], *QUICK, "--cache", cache]
    found = json.loads(invoke("evaluate", *options, "--json"))
    assert found["rsum"] > 0
    assert found["words"]["foils"] <= 20
    assert found["words"]["method"] == "parts"
    assert "word AUC" in invoke("evaluate", *options, "--markdown")
    assert "wrong words" in invoke("evaluate", *options)
    twice = json.loads(invoke("evaluate", *options, "--foils-per-caption", 2, "--json"))
    assert twice["words"]["foils"] > found["words"]["foils"]


@pytest.mark.slow
def test_each_run_gets_a_row_and_markdown_is_written(runs, cache, tmp_path) -> None:
    out = tmp_path / "results" / "table.md"
    both = [runs["naaf"], runs["vse-fc"], *QUICK, "--separately", "--cache", cache]
    printed = invoke("evaluate", *both, "--markdown", "--out", out)
    assert out.read_text().strip() == printed.strip()
    assert "| my-naaf | naaf |" in printed
    assert "| my-vse-fc | vse-fc |" in printed
    assert str(runs["naaf"].parent) not in printed
    tree = json.loads(invoke("evaluate", *both, "--json"))
    assert [run["words"]["method"] for run in tree["runs"]] == ["parts", "leave-one-out"]
    alone = json.loads(invoke("evaluate", runs["vse-fc"], *QUICK, "--cache", cache, "--json"))
    assert alone["words"] == tree["runs"][1]["words"]


def test_runs_on_other_data_are_not_put_in_one_table(runs, cache, tmp_path) -> None:
    other = tmp_path / "other"
    save = runs["naaf"] / "best"
    other.mkdir()
    (other / "best").symlink_to(save)
    config = {"data": {**SCENES, "options": {"images": [20, 4, 12]}}}
    (other / "config.yaml").write_text(build_config(config).to_yaml())
    with pytest.raises(ConfigError, match="name one data set for all with --data"):
        invoke("evaluate", runs["naaf"], other, "--separately", "--cache", cache)


def test_words_need_a_data_set_that_knows_the_truth(runs, cache, pairs, tmp_path) -> None:
    open_image(pairs.test.pixels[0]).save(tmp_path / "one.png")
    (tmp_path / "captions.jsonl").write_text(
        json.dumps({"image": "one.png", "captions": ["a dog"], "split": "test"}) + "\n"
    )
    with pytest.raises(DataError, match="does not say what is true"):
        invoke("evaluate", runs["naaf"], "--data", tmp_path / "captions.jsonl", *QUICK)


def test_the_picture_does_not_replace_the_photo(runs, tmp_path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    before = photo.read_bytes()
    with pytest.raises(ConfigError, match="this is the image itself"):
        invoke("explain", runs["naaf"], photo, SENTENCE, "--out", tmp_path / "." / "photo.png")
    assert photo.read_bytes() == before
