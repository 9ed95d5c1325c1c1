"""Where PyTorch scores instead of fused kernels, a command says so in one line."""

from __future__ import annotations

import pytest
import torch

from counterfoil.cli import app
from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.models import Model, create_model, save_pretrained
from counterfoil.scoring import engine as scoring_path
from counterfoil.scoring.engine import fallback
from counterfoil.training.run_data import read_data
from counterfoil.training.trainer import Trainer
from tests.cli.test_cli import runner
from tests.cli.test_correct import SCENES

LINE = "scoring by PyTorch on the CPU"


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


def config(name: str, **train: object):
    section = {"name": name, "embed_size": 16, "text": {"word_dim": 8}}
    tree = {"batch_size": 32, "epochs": 1, "device": "cpu", **train}
    return build_config({"data": SCENES, "model": section, "train": tree})


def make(pairs, name: str) -> Model:
    torch.manual_seed(0)
    model = create_model(config(name).model, pairs.train, config(name).data)
    model.fragments_from = "segments"
    return model


def saved(pairs, folder, name: str):
    save_pretrained(make(pairs, name), folder / name / "best")
    (folder / name / "config.yaml").write_text(config(name).to_yaml())
    return folder / name


def test_only_matchers_that_have_a_kernel_are_spoken_of(pairs) -> None:
    assert fallback(make(pairs, "naaf")) == LINE
    assert fallback(make(pairs, "vse-fc")) is None


def test_training_speaks_of_kernels_without_a_backward_pass(pairs, monkeypatch) -> None:
    monkeypatch.setattr(scoring_path, "without_kernels", lambda device: None)
    naaf, dive = make(pairs, "naaf"), make(pairs, "dive")
    assert fallback(naaf) is None
    assert fallback(naaf.train(), training=True) is None
    assert fallback(dive) is None
    assert "no backward pass" in str(fallback(dive.train(), training=True))


@pytest.mark.parametrize("each", [[], ["--separately"]])
def test_an_evaluation_says_it_once_for_all_its_models(pairs, cache, tmp_path, each) -> None:
    runs = [str(saved(pairs, tmp_path, name)) for name in ("vse-fc", "naaf", "chan")]
    asked = ["evaluate", *runs, *each, "--bootstrap", "0", "--cache", str(cache), "--device", "cpu"]
    found = runner.invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert found.stderr.count(LINE) == 1
    assert LINE not in found.stdout
    assert LINE not in runner.invoke(app, [*asked, "--json"]).output


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_training_says_it_once(pairs, tmp_path) -> None:
    said, asked = Said(), iter([False, True])
    trainer = Trainer(
        make(pairs, "naaf"), pairs, config("naaf"), tmp_path, said, should_stop=lambda: next(asked)
    )
    assert trainer.run().steps == 2
    assert said.lines.count(LINE) == 1
