"""What a loss does to the parameters, and that it goes on on another machine."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from counterfoil.core.config import TrainConfig
from counterfoil.core.errors import TrainingError
from counterfoil.training.optim import OptimizerStep, as_numbers, create_schedule


def updates(fused: bool | None, precision: str) -> OptimizerStep:
    """With the kernel that a device would choose, whatever the device."""
    torch.manual_seed(0)
    config = TrainConfig(precision=precision)
    result = OptimizerStep(nn.Linear(3, 2), config, 5, torch.device("cpu"))
    result.optimizer = torch.optim.AdamW(result.module.parameters(), lr=0.1, fused=fused)
    result.schedule = create_schedule(result.optimizer, config.schedule, 5, config.epochs)
    return result


def advance(found: OptimizerStep) -> None:
    found.backward(found.module(torch.ones(4, 3)).square().sum())
    found.unscale()
    found.step(float(found.gradient_norm()), 0)


@pytest.mark.parametrize("precision", ["float32", "fp16"])
@pytest.mark.parametrize("here", [None, True])
@pytest.mark.parametrize("there", [None, True])
def test_a_run_goes_on_with_the_kernels_of_the_machine_it_is_on(there, here, precision) -> None:
    saved, resumed = updates(there, precision), updates(here, precision)
    for _ in range(2):
        advance(saved)
    resumed.module.load_state_dict(saved.module.state_dict())
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert [group["fused"] for group in resumed.optimizer.param_groups] == [here]
    assert [group["fused"] for group in saved.state_dict()["optimizer"]["param_groups"]] == [there]
    advance(saved)
    advance(resumed)
    for mine, theirs in zip(saved.module.parameters(), resumed.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_a_gradient_longer_than_the_limit_is_cut_to_it(clip) -> None:
    result = updates(None, "float32")
    result.clip = clip
    result.optimizer = torch.optim.SGD(result.module.parameters(), lr=1.0)
    result.schedule = create_schedule(result.optimizer, TrainConfig().schedule, 5, 1)
    expected = copy.deepcopy(result.module)
    expected(torch.ones(4, 3)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), clip or float("inf"))
    assert 0.5 < float(norm) < 1e6
    result.backward(result.module(torch.ones(4, 3)).square().sum())
    assert float(result.gradient_norm()) == pytest.approx(float(norm))
    result.step(float(norm), 0)
    rate = result.schedule.base_lrs[0] * result.schedule.lr_lambdas[0](0)
    for mine, theirs in zip(result.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - rate * theirs.grad)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_gradient_without_end_is_refused_before_the_update(norm) -> None:
    result = updates(None, "float32")
    before = copy.deepcopy(result.module.state_dict())
    result.backward(result.module(torch.ones(4, 3)).square().sum())
    with pytest.raises(TrainingError, match="not a finite number"):
        result.step(norm, 0)
    for key, value in result.module.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"in 1 of 2 parameters, first bias\)"),
        (float("inf"), r"in 1 of 2 parameters, first bias\)"),
        (3e38, r"too large to add up\)"),
    ],
)
def test_what_is_refused_is_named(value, said) -> None:
    result = updates(None, "float32")
    result.backward(result.module(torch.ones(4, 3)).square().sum())
    result.module.bias.grad.fill_(value)
    with pytest.raises(TrainingError, match=said):
        result.step(float(result.gradient_norm()), 0)


def test_numbers_are_read_at_once_and_none_loses_digits() -> None:
    fine, coarse = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.5, dtype=torch.bfloat16)
    assert as_numbers(fine.requires_grad_(), coarse) == [0.1, 0.5]
    assert as_numbers(coarse) == [0.5]
