"""A run that ends within a warm-up says so when it starts, and trains as configured."""

from __future__ import annotations

import pytest

from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.optim import rate_factor, warmup_warnings
from counterfoil.training.trainer import Trainer


def warnings(objective, epochs: int = 3, per_epoch: int = 10, warmup_steps: int = 0) -> list[str]:
    schedule = {"warmup_steps": warmup_steps}
    train = build_config({"train": {"epochs": epochs, "schedule": schedule}}).train
    return warmup_warnings(train, create_objective(objective), per_epoch)


LONG = {
    "hardest": ({"warmup_epochs": 3}, "warmup_epochs=3: no epoch selects the hardest negatives"),
    "cfm": ({"warmup_epochs": 3}, "warmup_epochs=3: no epoch selects the hardest negatives"),
    "ncr": ({"warmup_epochs": 3}, "warmup_epochs=3: no epoch divides clean from noisy pairs"),
    "hrem-graph": ({}, "warmup=8000: the graph is never used in 30 updates"),
    "alignment": ({"kept": 2, "alone": 3}, "alone=3: no epoch trains the cross-encoder"),
    "triplet": ({"epochs": [3, None]}, "epochs=[3, null]: never active"),
}


@pytest.mark.parametrize("name", LONG)
def test_a_warmup_of_an_objective_that_never_ends_is_named(name) -> None:
    options, message = LONG[name]
    expected = [f"objective.{name}.{message} (this run has 3 epochs of 10 updates)"]
    assert warnings({name: options, "infonce": 1.0}) == expected
    if name != "hrem-graph":
        assert warnings({name: options, "infonce": 1.0}, epochs=4) == []


def test_a_warmup_that_ends_and_none_at_all_are_no_reason_to_warn() -> None:
    assert warnings({"hardest": {"warmup_epochs": 2}, "hrem-graph": {"warmup": 29}}) == []
    assert warnings({"hardest": {}, "hrem-graph": {"warmup": 0}}) == []
    assert warnings({"alignment": {"kept": 0, "alone": 9}}) == []  # only embeddings, as asked


def test_a_term_that_ends_within_its_warmup_is_named() -> None:
    terms = {"hardest": {"warmup_epochs": 2, "epochs": [0, 2]}, "triplet": {"epochs": [2, None]}}
    (warning,) = warnings(terms)
    assert warning.startswith("objective.hardest.warmup_epochs=2: ")


@pytest.mark.parametrize(("warmup", "share"), [(30, "100%"), (60, "50%"), (29, None)])
def test_a_learning_rate_that_rises_to_the_end_is_named_with_its_highest_value(
    warmup, share
) -> None:
    lines = warnings("triplet", warmup_steps=warmup)
    if share is None:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"train.schedule.warmup_steps={warmup}: the learning rate rises to the")
    assert f"to {share} of train.optimizer.lr" in line
    schedule = build_config({"train": {"schedule": {"warmup_steps": warmup}}}).train.schedule
    assert f"{rate_factor(schedule, 10, 3)(29):.0%}" == share


def test_a_run_says_it_once_at_its_start(concepts, tmp_path) -> None:
    class Lines(Silent):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def say(self, text: str) -> None:
            self.lines.append(text)

    config = build_config(
        {
            "model": {"name": "rvse-mlp", "embed_size": 8, "text": {"word_dim": 4}},
            "data": {"min_count": 1},
            "objective": {"hardest": {"warmup_epochs": 1}},
            "train": {"epochs": 1, "batch_size": 32, "accumulate": 2},
        }
    )
    model = create_model(config.model, concepts.train, config.data)
    progress = Lines()
    steps = Trainer(model, concepts, config, tmp_path, progress).run().steps
    spoken = [line for line in progress.lines if line.startswith("warning: objective.hardest")]
    assert spoken == [progress.lines[0]]
    assert f"(this run has 1 epoch of {steps} updates)" in spoken[0]
