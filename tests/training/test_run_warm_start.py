"""A run that starts from another: the weights, the log, resuming, what is refused at once."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.core.progress import Silent
from counterfoil.training.run import execute
from counterfoil.training.run_folder import resolve_paths, resumed_config

HEADS = ["mlm", "discrimination", "correction"]
SMALL = {"masks": 2, "samples": 2, "kept": 2}


class Heard(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def config(objective: dict, heads: list[str], start: str | None = None, **train):
    matcher = {"layers": 1, "heads": 2, "dropout": 0.0, "extras": heads}
    model = {"name": "uniter-small", "embed_size": 16, "matcher": matcher, "init_from": start}
    return build_config(
        {
            "data": {"options": {"images": [24, 8, 8]}, "min_count": 1, "captions": "one"},
            "model": model,
            "objective": objective,
            "train": {"epochs": 1, "batch_size": 8, "log_every": 1, **train},
            "evaluation": {"bootstrap": 0},
        }
    )


@pytest.fixture(scope="module")
def first(cache, tmp_path_factory):
    """A run of stage 1."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    execute(config({"tags": SMALL}, ["mlm"]), folder, cache)
    return folder


def test_stage_two_goes_on_from_stage_one_and_names_the_new_heads(first, cache, tmp_path) -> None:
    heard = Heard()
    still = config({"tags-dc": SMALL}, HEADS, str(first), optimizer={"lr": 1e-12})
    execute(still, tmp_path / "second", cache, progress=heard)
    assert any("new heads: discrimination, correction" in line for line in heard.lines)
    one, two = (
        load_file(run / "last" / "model.safetensors") for run in (first, tmp_path / "second")
    )
    best = load_file(first / "best" / "model.safetensors")
    assert one.keys() < two.keys()
    assert all(torch.allclose(best[key], two[key], atol=1e-6) for key in best)


@pytest.mark.slow
def test_a_resumed_run_does_not_start_again(first, cache, tmp_path) -> None:
    settings = config({"tags-dc": SMALL}, HEADS, str(first), save_every=1)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    execute(settings, whole, cache)
    asked = iter([False, True])
    parts = execute(settings, cut, cache, should_stop=lambda: next(asked))
    assert parts.result.interrupted
    heard = Heard()
    execute(resumed_config(cut, None), cut, cache, resume=True, progress=heard)
    assert not any("started from" in line for line in heard.lines)
    for name in ("metrics.jsonl", "last/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_resuming_from_another_start_is_refused(first, cache, tmp_path) -> None:
    settings = config({"tags-dc": SMALL}, HEADS, str(first))
    execute(settings, tmp_path, cache, should_stop=lambda: True)
    for other in (None, str(tmp_path)):
        asked = config({"tags-dc": SMALL}, HEADS, other)
        with pytest.raises(ConfigError, match=r"another model\.init_from"):
            resumed_config(tmp_path, asked)


def test_a_start_that_is_not_there_is_found_before_any_work(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        execute(config({"tags": {}}, ["mlm"], "nowhere"), tmp_path / "run", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_start_of_a_run_holds_from_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_paths(build_config({"model": {"init_from": "a"}})).model.init_from == str(
        tmp_path / "a"
    )


def test_what_does_not_decay_is_written_and_read_again() -> None:
    said = build_config({"train": {"optimizer": {"no_decay": "norms-and-biases"}}})
    assert "no_decay: norms-and-biases" in said.to_yaml()
    assert build_config(said.model_dump()) == said
