"""Runs of NAAF: captions in groups, what the run says at its start, what it plots."""

from __future__ import annotations

import json

import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.models import create_model
from counterfoil.training import step
from counterfoil.training.plots import plots_of
from counterfoil.training.trainer import Trainer
from tests.training.test_collapse import Heard


def run(pairs, folder, matcher=None, data=None):
    config = build_config(
        {
            "model": {
                "name": "naaf",
                "embed_size": 16,
                "text": {"word_dim": 8},
                "matcher": {"min_samples": 5, **(matcher or {})},
            },
            "data": {"min_count": 1, **(data or {})},
            "train": {"epochs": 1, "batch_size": 32, "log_every": 1},
        }
    )
    torch.manual_seed(0)
    heard = Heard()
    model = create_model(config.model, pairs.train, config.data)
    Trainer(model, pairs, config, folder, heard).run()
    return model, heard.said


@pytest.mark.parametrize("direction", ["t2i", "both"])
def test_naaf_trains_on_images_with_all_their_captions(concepts, tmp_path, direction) -> None:
    model, _ = run(concepts, tmp_path, {"direction": direction}, {"captions": "grouped"})
    for side in model.matcher.directions:
        assert int(model.matcher.boundaries[side].updates) > 0


def test_a_run_notes_at_its_start_that_alpha_is_never_adjusted(concepts, tmp_path) -> None:
    _, said = run(concepts, tmp_path / "never", {"adjust_epoch": 1})
    assert [text for text in said if "adjust_epoch=1" in text] == said[:1]
    _, said = run(concepts, tmp_path / "last", {"adjust_epoch": 0})
    assert not [text for text in said if "adjust_epoch" in text]


def test_both_boundaries_of_a_run_in_both_directions_are_logged_and_plotted(
    concepts, tmp_path
) -> None:
    run(concepts, tmp_path, {"direction": "both"})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    plots = plots_of(records, "dev")
    assert {"boundary-t2i", "boundary-i2t"} <= set(plots)
    assert "boundary" not in plots


@pytest.mark.parametrize("margin", [0.05, 0.6])
def test_the_tangential_gradients_are_those_of_the_objectives_margin(
    concepts, tmp_path, monkeypatch, margin
) -> None:
    margins = []
    measure = step.tangential_gradients

    def noted(*args, **options):
        margins.append(options.get("margin"))
        return measure(*args, **options)

    monkeypatch.setattr(step, "tangential_gradients", noted)
    config = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1},
            "objective": {"selhn": {"margin": margin}},
            "train": {"epochs": 1, "batch_size": 64},
        }
    )
    model = create_model(config.model, concepts.train, config.data)
    Trainer(model, concepts, config, tmp_path).run()
    assert margins
    assert set(margins) == {margin}


def epochs_of(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return records, [record for record in records if record["kind"] == "epoch"]


def test_each_epoch_of_a_run_keeps_a_histogram_of_matched_and_mismatched_samples(
    concepts, tmp_path
) -> None:
    run(concepts, tmp_path, {"direction": "both"})
    records, epochs = epochs_of(tmp_path)
    for side in ("t2i", "i2t"):
        [kept] = [record["mismatch_histogram"][side] for record in epochs]
        assert sum(kept["matched"]) > 0
        assert sum(kept["mismatched"]) > 0
        assert -1 <= kept["low"] < kept["high"] <= 1
        assert kept["boundary"] == records[-2][f"mismatch/{side}/boundary"]
    assert {"similarities-t2i", "similarities-i2t"} <= set(plots_of(records, "dev"))


@pytest.mark.slow
def test_a_run_cut_off_within_an_epoch_keeps_the_histogram_it_had(concepts, tmp_path) -> None:
    tree = {
        "model": {
            "name": "naaf",
            "embed_size": 16,
            "text": {"word_dim": 8},
            "matcher": {"min_samples": 5},
        },
        "data": {"min_count": 1},
        "train": {"epochs": 2, "batch_size": 32},
    }
    config = build_config(tree)

    def trainer(folder, stop=lambda: False):
        torch.manual_seed(0)
        model = create_model(config.model, concepts.train, config.data)
        return Trainer(model, concepts, config, folder, should_stop=stop)

    trainer(tmp_path / "whole").run()
    batches = iter(range(99))
    cut = trainer(tmp_path / "cut", lambda: next(batches) >= 2).run()
    assert cut.interrupted
    assert not epochs_of(tmp_path / "cut")[1]
    trainer(tmp_path / "cut").run(resume=True)
    whole, again = (epochs_of(tmp_path / name)[1] for name in ("whole", "cut"))
    assert len(whole) == 2
    for one, other in zip(whole, again, strict=True):
        assert one.get("mismatch_histogram") == other.get("mismatch_histogram")
    assert any("mismatch_histogram" in record for record in whole)


@pytest.mark.parametrize(
    "option",
    [
        {"masks": False},
        pytest.param({"mismatched": "all"}, marks=pytest.mark.slow),
        pytest.param({"update_mismatched": False}, marks=pytest.mark.slow),
    ],
)
def test_an_ablation_changes_what_a_run_learns(concepts, tmp_path, option) -> None:
    plain, _ = run(concepts, tmp_path / "plain")
    ablated, _ = run(concepts, tmp_path / "ablated", option)
    assert plain.matcher.boundary_of("t2i") != ablated.matcher.boundary_of("t2i")
