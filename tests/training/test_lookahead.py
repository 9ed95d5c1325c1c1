"""Updates that are tried: what they compute, and that they leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from counterfoil.core.config import build_config
from counterfoil.core.distributed import rank, world_size
from counterfoil.core.errors import TrainingError
from counterfoil.core.tensors.host_mirror import PendingCopy
from counterfoil.matchers.mismatch_boundary import MismatchBoundary
from counterfoil.models import create_model
from counterfoil.objectives import create_objective, objectives
from counterfoil.objectives.meta_spn import MetaSPN  # registers the one that tries
from counterfoil.training.lookahead import (
    HeldOutBatches,
    LookaheadFactory,
    StepTrial,
    restore_after,
    uses_lookahead,
)
from counterfoil.training.services import set_aside
from counterfoil.training.step import score_batch
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split

MODELS = ["rvse-mlp", "scan-t2i", "naaf", "saf"]


def settings_of(name: str, **train):
    return build_config(
        {
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 8, "dropout": 0.3}},
            "data": {"min_count": 1},
            "train": {"batch_size": 16, **train},
        }
    )


def make_trial(pairs, name: str = "rvse-mlp", share: float = 0.3) -> StepTrial:
    settings = settings_of(name)
    torch.manual_seed(0)
    model = create_model(settings.model, pairs.train, settings.data).train()
    train, held_out = set_aside(pairs.train, share, 0)
    batch = HeldOutBatches(train, model.text, settings)[0]
    return LookaheadFactory(model, held_out, settings, torch.device("cpu")).of(batch, 0, 0.1)


def everything(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_trial_leaves_no_trace(concepts, name) -> None:
    trial = make_trial(concepts, name)
    for weight in trial.weights:
        weight.grad = torch.rand_like(weight)
    grads = [weight.grad.clone() for weight in trial.weights]
    before, random = everything(trial.model), torch.get_rng_state()
    scores, positives = trial.scores()
    gradient = trial.gradient((scores * positives).sum())
    with trial.moved(gradient, -0.37):
        other, _ = trial.scores(trial.held_out_batch())
        trial.gradient(other.square().sum())
        moved = everything(trial.model)
    assert any(not torch.equal(moved[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in trial.model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for weight, grad in zip(trial.weights, grads, strict=True):
        assert torch.equal(weight.grad, grad)


class Passed:
    """An event of a GPU that has done what it was asked."""

    def synchronize(self) -> None:
        return None


def test_what_a_boundary_still_waits_for_is_no_trace_of_a_trial(monkeypatch) -> None:
    """On a GPU samples are on their way until somebody asks; a trial asks, too."""

    def sent(cls, pending, epoch):
        return cls(pending.clone(), Passed(), epoch)

    monkeypatch.setattr(PendingCopy, "start", classmethod(sent))

    def taught(trials: bool) -> dict[str, torch.Tensor]:
        learned = MismatchBoundary(1.0, 99, 0.5, 1)
        for step in range(3):
            rows = [[10, 6.0 + step, 4.0], [10, 2.0, 1.0]]
            learned.accumulate(torch.tensor(rows, dtype=torch.float64), 0)
            if trials:
                with restore_after(learned, torch.device("cpu")):
                    assert learned.value >= 0
        return learned.state_dict()

    expected = taught(trials=False)
    assert int(expected["updates"]) == 3
    for key, value in taught(trials=True).items():
        assert torch.equal(value, expected[key]), key


def test_weights_come_back_even_where_a_trial_fails(concepts) -> None:
    trial = make_trial(concepts)
    before = everything(trial.model)
    with pytest.raises(ValueError, match="of a trial"), trial.moved(trial.weights, 1e30):
        raise ValueError("of a trial")
    for key, value in trial.model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_a_trial_scores_as_the_coming_step_will(concepts, name) -> None:
    """The same random numbers, each time anew: dropout leaves out the same."""
    trial = make_trial(concepts, name)
    first, positives = trial.scores()
    again, _ = trial.scores()
    assert torch.equal(first, again)
    assert torch.equal(first, score_batch(trial.model, trial.batch).scores)
    assert not torch.equal(first, score_batch(trial.model, trial.batch).scores)
    assert torch.equal(positives, trial.batch.image_ids[:, None] == trial.batch.owners[None, :])


def test_the_gradient_is_that_of_backward_and_zero_where_a_weight_has_no_part(concepts) -> None:
    trial = make_trial(concepts)
    result = trial.gradient(trial.scores()[0].square().sum())
    trial.scores()[0].square().sum().backward()
    for weight, grad in zip(trial.weights, result, strict=True):
        assert torch.equal(weight.grad if weight.grad is not None else grad * 0, grad)
    alone = trial.gradient(trial.model.image_encoder.fc.bias.sum())
    assert sum(float(part.abs().sum()) for part in alone) == 16
    assert all(not part.any() for part in trial.gradient(torch.ones(())))


def test_moving_adds_the_direction(concepts) -> None:
    trial = make_trial(concepts)
    before = [weight.detach().clone() for weight in trial.weights]
    direction = [torch.randn_like(weight) for weight in trial.weights]
    with trial.moved(direction, 0.5):
        for weight, start, change in zip(trial.weights, before, direction, strict=True):
            assert torch.allclose(weight, start + 0.5 * change)


def test_frozen_weights_are_not_moved(concepts) -> None:
    settings = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 8, "text": {"frozen": True}},
            "data": {"min_count": 1},
        }
    )
    model = create_model(settings.model, concepts.train, settings.data)
    trial = LookaheadFactory(model, None, settings, torch.device("cpu")).of(None, 0, 0.1)
    frozen = model.text_encoder.word_table.weight
    assert all(weight is not frozen for weight in trial.weights)
    with pytest.raises(TrainingError, match="no held-out images"):
        trial.held_out_batch()


def test_held_out_batches_go_round_the_images_set_aside_in_a_new_order_each_time(concepts) -> None:
    settings = settings_of("vse-fc")
    _, held_out = set_aside(concepts.train, 0.3, 0)
    model = create_model(settings.model, concepts.train, settings.data)
    batches, again = (HeldOutBatches(held_out, model.text, settings) for _ in range(2))
    rounds = len(batches.plan)
    seen = [batches[number].caption_ids.tolist() for number in range(2 * rounds)]
    assert [again[n].caption_ids.tolist() for n in reversed(range(2 * rounds))] == seen[::-1]
    first, second = (
        [caption for captions in turn for caption in captions]
        for turn in (seen[:rounds], seen[rounds:])
    )
    assert len(set(first)) == len(first) == rounds * 16
    assert first != second


def test_training_and_held_out_images_share_nothing(concepts, tmp_path) -> None:
    settings = settings_of("vse-fc", epochs=1)
    tree = {**settings.model_dump(), "objective": {"meta-spn": {"meta_share": 0.25}}}
    settings = build_config(tree)
    torch.manual_seed(0)
    model = create_model(settings.model, concepts.train, settings.data)
    trainer = Trainer(model, concepts, settings, tmp_path)
    held_out = set(trainer.trials.held_out.items.split.ids)
    trained = set(trainer.batches.items.split.ids)
    assert len(held_out) == 24
    assert held_out | trained == set(concepts.train.ids)
    assert not held_out & trained


def test_only_objectives_that_look_ahead_are_given_trials() -> None:
    assert uses_lookahead(create_objective({"hardest": 1.0, "meta-spn": 0.5}))
    assert not uses_lookahead(create_objective("hardest"))
    needed = {"aoq": {"first": "runs/first"}, "ndgl": {"guide": "guides/a"}}
    built = {name: create_objective({name: needed.get(name, {})}) for name in objectives}
    assert [name for name, objective in built.items() if uses_lookahead(objective)] == ["meta-spn"]


def meta_gradient(folder: Path) -> list[Tensor]:
    """As this process, one of however many, finds it."""
    data = folder / f"data-{rank()}-{world_size()}"
    data.mkdir(parents=True)
    split = make_split(data, "train", 40, 0)
    tree = settings_of("rvse-mlp").model_dump()
    tree["model"]["text"]["dropout"] = 0.0
    settings = build_config(tree)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = create_model(settings.model, split, settings.data).train()
        objective = MetaSPN(hidden=8)
        torch.nn.init.normal_(objective.network.weigh.weight)
        train, held_out = set_aside(split, 0.3, 0)
        batch = HeldOutBatches(train, model.text, settings)[0]
        trial = LookaheadFactory(model, held_out, settings, torch.device("cpu")).of(batch, 3, 0.05)
        return list(objective.meta_gradient(trial))
    finally:
        torch.set_default_dtype(usual)


def test_two_processes_agree_on_the_meta_gradient_of_one(tmp_path, in_two_processes) -> None:
    one = meta_gradient(tmp_path)
    first, second = in_two_processes(meta_gradient, tmp_path)
    for alone, mine, theirs in zip(one, first, second, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.allclose(alone, mine, rtol=1e-5, atol=1e-9)
