"""NCR: parity of its losses, the mixture that divides pairs, and copies that teach each other."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.pairs import Pairs
from counterfoil.data.splits import shuffled_captions
from counterfoil.models import create_model
from counterfoil.objectives import Context, both_directions, create_objective, objectives
from counterfoil.objectives.ncr import (
    clean_probability,
    pair_losses,
    predict,
    soft_losses,
    soft_margins,
)
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.objectives.live import some_of


@pytest.fixture(scope="module")
def fixture():
    return load_fixture("loss-ncr")


def batch(fixture):
    scores = fixture["in.scores"].double().requires_grad_()
    return scores, both_directions(scores, torch.eye(len(scores), dtype=torch.bool))


def test_pair_losses_and_predictions_agree_with_the_reference(fixture) -> None:
    scores, both = batch(fixture)
    margin = fixture.hyper["margin"]
    losses = pair_losses(both, margin)
    assert_close(losses, fixture["out.eval_loss"], 1e-6)
    assert_close(predict(both, margin), fixture["out.predict"], 1e-6)
    assert_close(losses.sum(), fixture["out.warmup"], 1e-6)
    losses.sum().backward()
    assert_gradient_close(scores.grad, fixture["grad.warmup.scores"], 1e-6)


@pytest.mark.parametrize("kind", ["linear", "exponential", "sin"])
def test_soft_margins_agree_with_the_reference(fixture, kind) -> None:
    scores, both = batch(fixture)
    margins = soft_margins(fixture["in.labels"].double()[:, 0], fixture.hyper["margin"], kind)
    loss = soft_losses(both, margins, "reference").sum()
    assert_close(loss, fixture[f"out.soft_{kind}.column_labels"], 1e-6)
    loss.backward()
    assert_gradient_close(scores.grad, fixture[f"grad.soft_{kind}.column_labels.scores"], 1e-6)


def test_whole_margins_are_the_hardest_negative_loss(fixture) -> None:
    scores, both = batch(fixture)
    ones = torch.ones(len(scores), dtype=torch.float64)
    margins = soft_margins(ones, fixture.hyper["margin"], "exponential")
    for form in ("paper", "reference"):
        loss = soft_losses(both, margins, form).sum()
        assert_close(loss, fixture["out.train_hard"], 1e-6)


def test_in_paper_form_each_anchor_has_its_own_margin(fixture) -> None:
    scores, both = batch(fixture)
    margins = torch.linspace(0.0, 0.2, len(scores), dtype=torch.float64)
    values = scores.detach().tolist()
    expected = []
    for i, margin in enumerate(margins.tolist()):
        others = [j for j in range(len(values)) if j != i]
        by_image = max(max(0.0, margin + values[i][j] - values[i][i]) for j in others)
        by_text = max(max(0.0, margin + values[j][i] - values[i][i]) for j in others)
        expected.append(by_image + by_text)
    assert soft_losses(both, margins, "paper").tolist() == pytest.approx(expected)


@given(seed=st.integers(0, 10_000), noisy=st.floats(0.2, 0.6))
def test_the_mixture_finds_two_separate_heaps(seed, noisy) -> None:
    rng = np.random.default_rng(seed)
    wrong = rng.random(400) < noisy
    losses = np.where(wrong, rng.normal(3.0, 0.4, 400), rng.normal(0.5, 0.3, 400))
    result = clean_probability(losses) < 0.5
    assert (result == wrong).mean() > 0.98


def test_the_mixture_copes_with_equal_few_and_no_losses() -> None:
    assert clean_probability(np.full(7, 0.3)).tolist() == [1.0] * 7
    assert clean_probability(np.zeros(0)).tolist() == []
    few = clean_probability(np.array([0.1, 0.9]))
    assert few[0] > 0.99 > 0.01 > few[1]


def test_without_two_copies_it_says_what_to_do() -> None:
    objective = create_objective("ncr")
    assert objective.ensemble_size == 2
    with pytest.raises(TrainingError, match=r"model\.ensemble_size=2"):
        objective.compute(
            torch.randn(4, 4), torch.eye(4).bool(), Context(caption_ids=torch.arange(4))
        )
    with pytest.raises(ConfigError, match="at least 1"):
        create_objective({"ncr": {"warmup_epochs": 0}})


def trainer_of(
    pairs: Pairs, folder, should_stop=lambda: False, epochs=5, warmup_epochs=3, **options
) -> Trainer:
    config = build_config(
        {
            "model": {
                "name": "vse-fc",
                "embed_size": 32,
                "text": {"word_dim": 16},
                "ensemble_size": 2,
            },
            "data": {"min_count": 1},
            "objective": {"ncr": {"warmup_epochs": warmup_epochs, **options}},
            "train": {
                "epochs": epochs, "batch_size": 32, "optimizer": {"lr": 3e-3}, "log_every": 1,
            },
        }
    )  # fmt: skip
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    return Trainer(model, pairs, config, folder, should_stop=should_stop)


SHORT = {"epochs": 3, "warmup_epochs": 1}
"""Of `some_of` the data: one epoch of three steps, then two whose pairs are divided."""


@pytest.fixture(scope="module")
def whole(concepts, tmp_path_factory) -> bytes:
    """The metrics of a short run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer_of(some_of(concepts), folder, **SHORT).run()
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [5, 6])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    concepts, whole, tmp_path, stop_after
) -> None:
    pairs, command = some_of(concepts), iter(range(1000))
    cut = trainer_of(pairs, tmp_path, lambda: next(command) + 1 >= stop_after, **SHORT)
    assert cut.run().interrupted
    trainer_of(pairs, tmp_path, **SHORT).run(resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_it_learns_which_captions_were_moved_to_a_wrong_image(concepts, tmp_path) -> None:
    noisy, index = shuffled_captions(concepts.train, 0.3, seed=3)
    pairs = Pairs("noisy", {**concepts.splits, "train": noisy})
    trainer = trainer_of(pairs, tmp_path)
    trainer.run()
    clean = trainer.objective.terms["ncr"].clean.mean(0).numpy()
    moved = index != np.arange(len(index))
    assert clean[~moved].mean() > clean[moved].mean() + 0.3
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [r["ncr/clean"] for r in records if "ncr/clean" in r]
    assert shares
    assert all(0 < share <= 1 for share in shares)


def test_before_its_turn_a_noisy_pair_costs_nothing(concepts, tmp_path) -> None:
    term = trainer_of(concepts, tmp_path, noisy_from=99).objective.terms["ncr"]
    scores, positives = torch.randn(4, 4, requires_grad=True), torch.eye(4).bool()
    context = Context(epoch=3, caption_ids=torch.arange(4), members=(scores, scores.detach()))
    term.clean[1, 2] = 0.0  # what the other copy thinks of pair 2
    term.compute(scores, positives, context).loss.backward()
    # as an anchor it is silent: nothing pulls its own score up
    assert scores.grad[2, 2] == 0
    assert scores.grad[0, 0] < 0


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_form_of_public_code_has_one_caption_per_image(epoch) -> None:
    objective = objectives["ncr"](form="reference")
    scores, positives = torch.randn(2, 4), torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    context = Context(epoch=epoch, caption_ids=torch.arange(4), members=(scores, scores))
    with pytest.raises(ConfigError, match=r"form=reference is defined for one caption per image"):
        objective.compute(scores, positives, context)
