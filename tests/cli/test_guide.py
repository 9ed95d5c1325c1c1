"""`counterfoil guide` as a person uses it: build, look, train with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import counterfoil.objectives.ndgl  # noqa: F401 - registers 'ndgl'
from counterfoil.core.errors import BusyError, CheckpointError, ConfigError, DataError
from counterfoil.core.storage.locks import LOCK
from tests.cli.test_cli import invoke
from tests.conftest import thinned
from tests.holding import content, held

SMALL = [
    "data.min_count=1", "model.name=vse-fc", "model.embed_size=16", "model.text.word_dim=8",
    "train.batch_size=16", "train.epochs=1", "evaluation.bootstrap=0", "train.log_every=1",
]  # fmt: skip


def write_features(folder: Path) -> Path:
    """A small data set in SCAN's layout."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    things = ["dog", "cat", "car", "tree", "boat"]
    for split, images in {"train": 20, "dev": 6, "test": 6}.items():
        np.save(folder / f"{split}_ims.npy", rng.normal(size=(images, 4, 8)).astype(np.float32))
        lines = [f"a {things[i % 5]} and {things[k]} {i}" for i in range(images) for k in range(5)]
        (folder / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")
        (folder / f"{split}_ids.txt").write_text("\n".join(map(str, range(images))) + "\n")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_features(tmp_path_factory.mktemp("cli-guide") / "data")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cli-guide-runs")
    for seed in (0, 1):
        options = [f"data.source={data}", f"seed={seed}", "--out", folder / f"run-{seed}"]
        invoke("train", *SMALL, *options, "--cache", folder / "cache")
    return [folder / "run-0", folder / "run-1"]


@pytest.mark.parametrize("form", thinned(["matrix", "embeddings"], "embeddings"))
def test_a_guide_is_built_shown_and_trained_with(data, runs, tmp_path, form) -> None:
    guide, cache = tmp_path / "guide", ["--cache", tmp_path / "cache"]
    invoke("guide", "build", *runs, "--out", guide, "--form", form, "--device", "cpu", *cache)
    shown = json.loads(invoke("guide", "show", guide, "--json"))
    assert shown["complete"]
    assert shown["form"] == form
    assert shown["data"]["images"] == 20
    assert shown["data"]["captions"] == 100
    assert [teacher["run"] for teacher in shown["teachers"]] == ["run-0", "run-1"]
    assert shown["bytes"] > 20 * 100 * 2
    text = invoke("guide", "show", guide)
    assert "run-1" in text
    assert "complete" in text
    options = [f"data.source={data}", "objective.hardest=1.0", f"objective.ndgl.guide={guide}"]
    invoke("train", *SMALL, *options, "--out", tmp_path / "run", *cache)
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert all(0 <= r["ndgl/agreement"] <= 1 for r in records if r["kind"] == "step")


def test_building_a_finished_guide_again_changes_nothing(runs, tmp_path) -> None:
    build = ["guide", "build", *runs, "--out", tmp_path / "g", "--json"]
    first = json.loads(invoke(*build, "--cache", tmp_path / "cache"))
    assert first["form"] == "matrix"
    assert json.loads(invoke(*build, "--cache", tmp_path / "cache")) == first


def test_runs_on_different_data_are_refused_by_what_differs(runs, tmp_path) -> None:
    cache = ["--cache", tmp_path / "cache"]
    shutil.copytree(runs[0], tmp_path / "stranger", symlinks=True)
    config = tmp_path / "stranger" / "config.yaml"
    config.write_text(config.read_text().replace("source: ", "source: /other"))
    with pytest.raises(ConfigError, match=r"different data \(data\.source: '/other.*' and "):
        invoke("guide", "build", runs[0], tmp_path / "stranger", "--out", tmp_path / "g", *cache)
    assert not (tmp_path / "g").exists()


def test_a_saved_model_takes_the_data_of_a_run(runs, tmp_path) -> None:
    shutil.copytree(runs[1] / "best", tmp_path / "model")
    cache = ["--cache", tmp_path / "cache"]
    invoke("guide", "build", tmp_path / "model", runs[0], "--out", tmp_path / "g", *cache)
    with pytest.raises(ConfigError, match="none of these is a run that names its data"):
        invoke("guide", "build", tmp_path / "model", "--out", tmp_path / "h", *cache)


def test_a_run_that_is_named_twice_is_refused(runs, tmp_path) -> None:
    again = runs[0].parent / "." / runs[0].name
    with pytest.raises(ConfigError, match="named twice"):
        invoke("guide", "build", runs[0], again, "--out", tmp_path / "g", "--cache", tmp_path)


def test_what_is_not_there_is_a_clear_error(tmp_path) -> None:
    with pytest.raises(DataError, match="not a guide"):
        invoke("guide", "show", tmp_path)
    with pytest.raises(CheckpointError, match="neither a run nor a saved model"):
        invoke("guide", "build", tmp_path, "--out", tmp_path / "g", "--cache", tmp_path / "cache")


def test_a_second_build_does_not_write_into_the_guide_of_the_first(runs, tmp_path) -> None:
    guide = tmp_path / "guide"
    with held(guide / LOCK):
        with pytest.raises(BusyError, match="another process is building a guide there"):
            invoke("guide", "build", *runs, "--out", guide, "--cache", tmp_path / "cache")
        assert content(guide) == {}
    invoke("guide", "build", *runs, "--out", guide, "--cache", tmp_path / "cache")


def test_a_guide_that_is_complete_is_found_so_without_the_lock(runs, tmp_path) -> None:
    guide = tmp_path / "guide"
    words = ["--out", guide, "--cache", tmp_path / "cache"]
    invoke("guide", "build", *runs, *words)
    before = content(guide)
    with held(guide / LOCK):
        invoke("guide", "build", *runs, *words)
        with pytest.raises(DataError, match="other teachers"):
            invoke("guide", "build", runs[0], *words)
    assert content(guide) == before
