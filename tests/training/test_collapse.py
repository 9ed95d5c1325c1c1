"""A run that collapses says so, and the same run with SelHN does not collapse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.data.batches.collate import PairBatch
from counterfoil.data.pairs import Pairs
from counterfoil.models import create_model
from counterfoil.training.step import anchors_and_negatives
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split


class Heard(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Pairs:
    folder = tmp_path_factory.mktemp("many")
    sizes = {"train": 1024, "dev": 16}  # many updates an epoch: an epoch's end costs as much
    return Pairs("many", {n: make_split(folder, n, k, s) for s, (n, k) in enumerate(sizes.items())})


COLLAPSES, LEARNS = 0.1, 0.005
"""Learning rates at which this model runs into one point, and at which it is slow to leave."""


def trainer(
    pairs, folder, objective: str, lr: float = COLLAPSES, **kwargs
) -> tuple[Trainer, Heard]:
    config = build_config(
        {
            "model": {"name": "vse-mlp", "embed_size": 32, "text": {"word_dim": 16}},
            "data": {"min_count": 1},
            "objective": {objective: {"reduction": "mean"}},
            "train": {"epochs": 2, "batch_size": 32, "log_every": 5, "optimizer": {"lr": lr}},
        }
    )
    torch.manual_seed(0)
    heard = Heard()
    model = create_model(config.model, pairs.train, config.data)
    return Trainer(model, pairs, config, folder, heard, **kwargs), heard


def run(pairs, folder, objective: str, lr: float = COLLAPSES) -> list[str]:
    training, heard = trainer(pairs, folder, objective, lr)
    training.run()
    return [text for text in heard.said if "collapsed" in text]


@pytest.fixture(scope="module")
def collapsed(pairs, tmp_path_factory) -> tuple[Path, list[str]]:
    """Folder of a run that collapses, and what it said of it."""
    folder = tmp_path_factory.mktemp("collapsed")
    return folder, run(pairs, folder, "hardest")


@pytest.mark.slow
def test_hardest_negatives_collapse_a_deep_encoder_and_selhn_does_not(
    pairs, collapsed, tmp_path
) -> None:
    folder, warnings = collapsed
    assert len(warnings) == 1
    assert "gradient vanishes" in warnings[0]
    assert "objective=selhn" in warnings[0]
    records = [json.loads(x) for x in (folder / "metrics.jsonl").open()]
    assert [r for r in records if r["kind"] == "warning"]
    steps = [r for r in records if r["kind"] == "step"]
    assert min(r["gap/abs"] for r in steps) < 0.01
    assert max(r["separation"] for r in steps) < 0.8
    assert min(r["tangent/anchor"] for r in steps) < 0.5 * steps[0]["tangent/anchor"]
    assert run(pairs, tmp_path, "selhn") == []


@pytest.mark.slow
def test_a_run_that_learns_to_rank_below_the_margin_is_not_called_collapsed(
    pairs, tmp_path
) -> None:
    """Its loss is that of equal scores for sixty updates, and nearly all negatives are in order."""
    assert run(pairs, tmp_path, "hardest", LEARNS) == []
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").open()]
    epochs = [r["dev"]["rsum"] for r in records if r["kind"] == "epoch"]
    steps = [r for r in records if r["kind"] == "step"]
    assert epochs[-1] > 500
    assert sum(r["gap/abs"] < 0.02 and 0.18 < r["loss"] < 0.22 for r in steps) >= 10
    assert steps[-1]["separation"] > 0.95


@pytest.mark.slow
def test_a_run_resumed_within_the_plateau_warns_at_the_same_step(
    pairs, collapsed, tmp_path
) -> None:
    command = iter(range(1000))
    cut, _ = trainer(pairs, tmp_path, "hardest", should_stop=lambda: next(command) + 1 >= 40)
    assert cut.run().interrupted
    assert cut.watch.state_dict()["streak"] > 0
    resumed, _ = trainer(pairs, tmp_path, "hardest")
    resumed.run(resume=True)
    whole, again = (folder / "metrics.jsonl" for folder in (collapsed[0], tmp_path))
    assert whole.read_bytes() == again.read_bytes()


def test_an_epoch_without_a_term_is_refused_before_anything_is_trained(pairs, tmp_path) -> None:
    config = build_config({"objective": {"hardest": {"epochs": [1, None]}}})
    model = create_model(config.model, pairs.train, config.data)
    with pytest.raises(ConfigError, match="no term is active in epoch 0"):
        Trainer(model, pairs, config, tmp_path)


def test_negatives_are_counted_in_pairs_groups_and_views(pairs) -> None:
    def batch(images: list[int], owners: list[int]) -> PairBatch:
        return PairBatch(None, None, torch.tensor(images), None, torch.tensor(owners))

    assert anchors_and_negatives(batch([0, 1, 2], [0, 1, 2])) == (3, 2.0)
    assert anchors_and_negatives(batch([0, 0, 1, 1], [0, 0, 1, 1])) == (4, 2.0)
    assert anchors_and_negatives(batch([0, 1], [0, 0, 0, 1, 1, 1])) == (6, 2.0)
