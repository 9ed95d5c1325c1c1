"""`counterfoil features` as a person uses it."""

from __future__ import annotations

import csv
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import BusyError, ConfigError, DataError
from counterfoil.core.storage.locks import beside
from counterfoil.data import load_pairs
from counterfoil.data.images import open_image
from counterfoil.features import Segments, extractors
from tests.features.tiny_networks import photos, picture, save_network
from tests.holding import content, held

runner = CliRunner()
SEGMENTS = (
    "--backbone",
    "segments",
    "--backbone-option",
    "side=32",
    "--backbone-option",
    "max_fragments=4",
)


def invoke(*args: object, code: int = 0):
    result = runner.invoke(app, ["features", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A folder of ten photos with a table of captions."""
    photos(tmp_path / "photos", 10)
    with (tmp_path / "photos" / "captions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for number in range(10):
            split = "train" if number < 6 else "dev" if number < 8 else "test"
            writer.writerow([f"{number}.png", f"a picture, number {number}", split])
    return tmp_path / "photos"


@pytest.mark.parametrize("layout", ["scan", "jsonl", "shards"])
def test_the_result_is_a_data_set_with_fragments(table, tmp_path, layout: str) -> None:
    out = tmp_path / "out"
    invoke(table, "-o", out, *SEGMENTS, "--to", layout, "--cache", tmp_path / "cache")
    made = load_pairs(out)
    assert {split.name: len(split) for split in made} == {"train": 6, "dev": 2, "test": 2}
    fragments = made.train.fragments
    assert fragments is not None
    assert made.train.pixels is not None
    assert fragments.features.dtype == np.float16
    expected = Segments(side=32, max_fragments=4).extract(open_image(made.train.pixels[5]))
    np.testing.assert_allclose(fragments.read(5).features, expected.features, atol=2e-3)
    np.testing.assert_allclose(fragments.read(5).boxes, expected.boxes, atol=1e-6)
    assert made.train.captions[5] == ["a picture, number 5"]
    assert made.problems == []


def test_what_made_the_features_makes_them_again(table, tmp_path) -> None:
    out = tmp_path / "out"
    invoke(table, "-o", out, *SEGMENTS, "--no-images", "--cache", tmp_path / "cache")
    made = load_pairs(out).train
    assert made.pixels is None
    assert made.fragments is not None
    tool = extractors.create(made.fragments.made_by, {})
    results = tool.extract(picture(3))
    np.testing.assert_allclose(made.fragments.read(3).features, results.features, atol=2e-3)
    manifest = json.loads((out / "features.json").read_text())
    assert manifest["extractor"]["fingerprint"] == tool.fingerprint()
    assert manifest["extractor"]["options"] == {"side": 32, "max_fragments": 4}
    assert manifest["features"] == {"fragments": 4, "dim": tool.dim, "dtype": "float16"}


def test_failures_are_counted_and_strictness_is_an_exit_code(table, tmp_path) -> None:
    (table / "2.png").write_bytes(b"")
    (table / "8.png").write_bytes(b"not an image")
    args = (table, *SEGMENTS, "--cache", tmp_path / "cache")
    printed = json.loads(invoke(*args, "-o", tmp_path / "a", "--json").stdout)
    assert printed["splits"]["train"] == {"images": 5, "captions": 5, "failed": 1}
    assert printed["splits"]["test"]["failed"] == 1
    assert printed["problems"]["unreadable-image"] == 2
    assert len(printed["failed"]) == 2
    text = invoke(*args, "-o", tmp_path / "b", "--strict", code=3).stdout
    assert "train/2" in text
    assert "2 failed" in text
    assert len(load_pairs(tmp_path / "b").train) == 5


def test_a_split_of_which_nothing_can_be_read_is_an_error(table, tmp_path) -> None:
    for number in (8, 9):
        (table / f"{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match="none of its 2 images") as caught:
        invoke(table, "-o", tmp_path / "out", *SEGMENTS, "--cache", tmp_path / "cache")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_folder_of_photos_needs_no_captions(tmp_path) -> None:
    photos(tmp_path / "trip" / "day one", 3)
    (tmp_path / "trip" / "notes.md").write_text("a nice trip")
    (tmp_path / "trip" / "prices.csv").write_text("product,price\nlamp,12\n")
    args = (tmp_path / "trip", "-o", tmp_path / "out", *SEGMENTS, "--cache", tmp_path / "cache")
    printed = json.loads(invoke(*args, "--json").stdout)
    assert printed["splits"] == {"all": {"images": 3, "captions": 0, "failed": 0}}
    made = load_pairs(tmp_path / "out", strict=False)["all"]
    assert list(made.ids) == ["day one/0", "day one/1", "day one/2"]
    assert made.fragments is not None
    notes = " ".join(invoke(*args, "--overwrite").stderr.split())
    assert "prices.csv: not used as captions: no column of captions" in notes
    for name in ("captions.csv", "odd.csv"):
        (tmp_path / "trip" / name).write_text("image,caption\nday one/0.png,a dog\n")
    notes = " ".join(invoke(*args, "--overwrite").stderr.split())
    assert "odd.csv: not used as captions: the captions are from captions.csv" in notes


def test_without_weights_segments_are_taken_and_said_to_be(table, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = invoke(table, "-o", tmp_path / "out", "--cache", tmp_path / "cache")
    assert result.stderr.count("counterfoil[vision]") == 1
    fragments = load_pairs(tmp_path / "out").train.fragments
    assert fragments is not None
    assert fragments.made_by == "segments"


def test_mistakes_are_told_before_the_work(table, tmp_path) -> None:
    place = ("--cache", tmp_path / "cache")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for error, message, args in (
        (DataError, "not empty", (table, "-o", tmp_path / "full")),
        (ConfigError, "did you mean 'segments'", (table, "-o", tmp_path / "o", "-b", "segment")),
        (
            ConfigError,
            "did you mean 'side'",
            (table, "-o", tmp_path / "o", "-b", "segments", "--backbone-option", "sid=3"),
        ),
        (DataError, "no such file", (tmp_path / "nowhere", "-o", tmp_path / "o")),
    ):
        with pytest.raises(error, match=message):
            invoke(*args, *place)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "interrupted; repeat the command to continue"), (("--no-cache",), "interrupted")],
)
def test_an_interrupted_extraction_says_whether_it_goes_on(
    table, tmp_path, monkeypatch, options, said
) -> None:
    def stop(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("counterfoil.features.build.build_features", stop)
    asked = ["features", str(table), "--out", str(tmp_path / "out"), *options]
    result = runner.invoke(app, [*asked, "--cache", str(tmp_path / "cache")])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == said


def test_a_folder_that_cannot_be_written_is_refused_before_the_data_are_read(
    table, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (table / "captions.csv").write_text("no table")
    cases = [
        ("is a file", (tmp_path / "file",)),
        ("file is not a folder", (tmp_path / "file" / "out",)),
        ("file is not a folder", (tmp_path / "file" / "out", "--part", "1/2")),
        ("not empty", (table,)),
        ("not empty", (table, "--merge")),
        ("would delete", (tmp_path, "--overwrite")),
    ]
    monkeypatch.chdir(tmp_path)
    for message, args in cases:
        with pytest.raises(DataError, match=message):
            invoke(table, *SEGMENTS, "--cache", tmp_path / "cache", "--out", *args)


def test_features_are_replaced_not_added_to(table, tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    cache = ("--cache", tmp_path / "cache")
    invoke(table, "-o", first, *SEGMENTS, *cache)
    invoke(first, "-o", second, "-b", "segments", "--backbone-option", "max_fragments=2", *cache)
    fragments = load_pairs(second).train.fragments
    assert fragments is not None
    assert fragments.max_fragments == 2
    invoke(table, "-o", tmp_path / "third", *SEGMENTS, "--no-images", *cache)
    with pytest.raises(DataError, match="no images to take features from"):
        invoke(tmp_path / "third", "-o", tmp_path / "fourth", *SEGMENTS, *cache)


def test_a_network_runs_from_the_command_line(table, tmp_path) -> None:
    model = save_network(tmp_path / "vit", "vit")
    args = (
        "-b",
        "transformers",
        "--backbone-option",
        f"model={model}",
        "--device",
        "cpu",
        "--workers",
        2,
    )
    invoke(table, "-o", tmp_path / "out", *args, "--cache", tmp_path / "cache")
    fragments = load_pairs(tmp_path / "out").train.fragments
    assert fragments is not None
    assert fragments.features.shape == (6, 17, 16)


@pytest.mark.slow
def test_work_that_was_killed_ends_in_the_same_bytes(tmp_path) -> None:
    photos(tmp_path / "photos", 200)
    args = [
        str(tmp_path / "photos"), "--backbone", "segments", "--workers", "1", "--no-images",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    command = [sys.executable, "-m", "counterfoil", "features", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("cache/image-features/*/*.rows")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    assert "cache: 0 of 200" not in invoke(*args).stdout
    fresh = [*args[:-3], str(tmp_path / "other"), "--out", str(tmp_path / "whole")]
    invoke(*fresh)
    for path in (tmp_path / "whole").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_features_and_imports_are_not_written_where_another_process_writes(table, tmp_path) -> None:
    out = tmp_path / "out"
    with held(beside(out)):
        with pytest.raises(BusyError, match="another process is writing features"):
            invoke(table, *SEGMENTS, "--out", out, "--cache", tmp_path / "cache")
        words = ["import", "--from", "scan", str(tmp_path / "none.pth"), "-o", str(out)]
        assert isinstance(runner.invoke(app, words).exception, BusyError)
    assert not out.exists()


def test_dropped_captions_and_missing_files_are_counted_and_named(table, tmp_path) -> None:
    text = (table / "captions.csv").read_text().replace('"a picture, number 4"', "")
    lost = "".join(f"lost {number}.png,a picture,train\n" for number in range(7))
    (table / "captions.csv").write_text(text + lost)
    args = (table, *SEGMENTS, "--cache", tmp_path / "cache")
    printed = invoke(*args, "-o", tmp_path / "out").stdout
    assert "left out, missing-image: 7" in printed
    assert "there is no image file 'lost 0.png'" in printed
    assert f"looked in {table}" in printed
    assert "… and 2 more" in printed
    assert "left out, empty-caption: 1" in printed
    manifest = json.loads((tmp_path / "out" / "features.json").read_text())
    assert sum(one["kind"] == "missing-image" for one in manifest["left_out"]) == 7
    invoke(*args, "-o", tmp_path / "strict", "--strict", code=3)


def _subset(table: Path, numbers: range) -> Path:
    """Another table of captions of the same photos, with other splits."""
    path = table / "subset.csv"
    rows = [f"{n}.png,other words {n},{'test' if n % 2 else 'train'}" for n in numbers]
    path.write_text("\n".join(["image,caption,split", *rows]))
    return path


def test_another_table_of_the_same_photos_extracts_nothing_again(table, tmp_path) -> None:
    cache = ("--cache", tmp_path / "cache")
    first = invoke(table / "captions.csv", "-o", tmp_path / "first", *SEGMENTS, *cache)
    assert "0 of 10 images from the cache" in first.stdout
    subset = _subset(table, range(2, 9))
    second = invoke(subset, "-o", tmp_path / "second", *SEGMENTS, *cache)
    assert "7 of 7 images from the cache" in second.stdout
    third = invoke(subset, "-o", tmp_path / "third", *SEGMENTS, *cache, "--no-cache", "--json")
    assert json.loads(third.stdout)["cache"]["folder"] is None
    for path in (tmp_path / "third").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
    assert not list(tmp_path.glob(".counterfoil-*"))


def test_the_cache_of_features_is_listed_and_cleared(table, tmp_path) -> None:
    cache = ("--cache", str(tmp_path / "cache"))
    summary = invoke(table, "-o", tmp_path / "out", *SEGMENTS, *cache).stdout
    assert f"counterfoil data cache --clear --cache {tmp_path / 'cache'}" in summary
    listed = json.loads(runner.invoke(app, ["data", "cache", *cache, "--json"]).stdout)
    assert [one["images"] for one in listed["extractors"]] == [10]
    assert listed["bytes"] > 0
    assert "MB deleted" in runner.invoke(app, ["data", "cache", *cache, "--clear"]).stdout
    assert not (tmp_path / "cache" / "image-features").exists()
    again = invoke(table, "-o", tmp_path / "again", *SEGMENTS, *cache)
    assert "0 of 10 images from the cache" in again.stdout


def test_parts_and_a_merge_are_one_command(table, tmp_path) -> None:
    common = (table / "captions.csv", *SEGMENTS, "--no-cache", "--workers", 1)
    said = invoke(*common, "--out", tmp_path / "parts", "--part", "1/2").output
    assert "part 1 of 2 is complete, 5 images, 5 extracted now, 0 failed" in " ".join(said.split())
    report = json.loads(
        invoke(*common, "--out", tmp_path / "parts", "--part", "2/2", "--json").output
    )
    assert (report["part"], report["parts"], report["images"]) == (2, 2, 5)
    invoke(*common, "--out", tmp_path / "parts", "--merge")
    invoke(*common, "--out", tmp_path / "whole")
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    for wrong in (("--part", "3/2"), ("--part", "1/2", "--merge"), ("--part", "auto")):
        with pytest.raises(ConfigError, match="--part"):
            invoke(*common, "--out", tmp_path / "other", *wrong)
