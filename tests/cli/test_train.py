"""`counterfoil train`: what it refuses, warns of and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import ConfigError

SMALL = ["data.options={images: 30}", "model.embed_size=8", "train.epochs=1", "train.device=cpu"]


def train(tmp_path: Path, *arguments: str):
    where = ["--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]
    return CliRunner().invoke(app, ["train", "scenes/rvse-mlp", *SMALL, *where, *arguments])


@pytest.mark.parametrize("split", ["dev", "test"])
def test_the_split_that_selected_the_checkpoint_is_named(tmp_path, split) -> None:
    result = train(tmp_path, f"evaluation.split={split}")
    assert result.exit_code == 0, result.output
    assert f" on {split}, at epoch 1" in " ".join(result.output.split())
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f" on {split}, at epoch 1" in page
    assert "dev RSUM" not in result.output + page


def test_json_names_the_split_and_a_warmup_as_long_as_the_run_is_a_warning(tmp_path) -> None:
    result = train(tmp_path, "evaluation.split=test", "--json")
    assert json.loads(result.stdout)["selected_on"] == "test"
    loud = train(tmp_path, "--overwrite", "train.schedule.warmup_steps=500")
    said = " ".join(loud.output.split())
    assert "warning: objective.hardest.warmup_epochs=1: no epoch selects the hardest" in said
    assert "warning: train.schedule.warmup_steps=500: the learning rate rises to the end" in said


def test_nothing_is_trained_if_nothing_is_named(tmp_path) -> None:
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, ConfigError)
    assert "name a recipe, such as scenes/naaf" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_an_option_without_effect_is_refused_before_any_work(tmp_path) -> None:
    result = train(tmp_path, "train.schedule.factor=0.5")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        "train.schedule.factor=0.5 has no effect with train.schedule.name=cosine: set "
        "train.schedule.name to step, or remove train.schedule.factor (its default is 0.1)"
    )
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_started_with_such_an_option_can_be_resumed(tmp_path) -> None:
    assert train(tmp_path).exit_code == 0
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("factor: 0.1", "factor: 0.5"))
    run, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    result = CliRunner().invoke(app, ["train", "--resume", run, "--cache", cache])
    assert result.exit_code == 0, result.output
