"""InfoNCE and SigLIP: parity, loops, and the temperature that is learned."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.objectives import Context, create_objective, objectives
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.objectives.cases import cases, make_case


@pytest.mark.parametrize("option", ["T0.05", "T0.5m0.1"])
def test_infonce_agrees_with_chan_with_gradients(option) -> None:
    fixture = load_fixture("chan-infonce")
    scores = fixture["in.scores"].double().requires_grad_()
    objective = objectives["infonce"](form="chan", learned=False, **fixture.options[option])
    loss = objective.compute(scores, torch.eye(len(scores)).bool(), Context()).loss
    assert_close(loss, fixture[f"out.{option}.loss"], 1e-9)
    loss.backward()
    assert_gradient_close(scores.grad, fixture[f"grad.{option}.scores"], 1e-6)


def test_without_repeated_images_infonce_is_cross_entropy_both_ways() -> None:
    case = make_case(list(range(6)))
    logits, labels = case.scores / 0.07, torch.arange(6)
    expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss = case.loss(objectives["infonce"]()).detach()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@given(case=cases(), margin=st.sampled_from([0.0, 0.1]))
def test_infonce_equals_a_naive_loop(case, margin) -> None:
    costs = [
        math.log(1 + sum(math.exp((n - p + margin) / 0.3) for n in negatives))
        for p, negatives in case.anchors()
    ]
    objective = objectives["infonce"](temperature=0.3, learned=False, margin=margin)
    assert float(case.loss(objective)) == pytest.approx(sum(costs) / len(costs), abs=1e-9)


@given(case=cases())
def test_siglip_equals_a_naive_loop(case) -> None:
    total = 0.0
    rows, columns = case.scores.shape
    for i in range(rows):
        for j in range(columns):
            logit = 4 * float(case.scores[i, j]) - 1
            if case.positives[i, j]:
                total -= math.log(1 / (1 + math.exp(-logit)))
            elif not case.protected[i, j]:
                total -= math.log(1 / (1 + math.exp(logit)))
    objective = objectives["siglip"](scale=4.0, bias=-1.0, learned=False)
    assert float(case.loss(objective)) == pytest.approx(total / columns, abs=1e-9)


def test_siglip_starts_where_its_authors_start() -> None:
    objective = objectives["siglip"]()
    assert objective.scale(torch.zeros(1)).item() == pytest.approx(10)
    assert objective.bias.item() == -10


@pytest.mark.parametrize("name", ["infonce", "siglip"])
def test_temperature_and_bias_get_gradients_only_where_they_are_learned(name) -> None:
    case = make_case(list(range(4)))
    learned = objectives[name]()
    case.loss(learned).backward()
    assert all(value.grad is not None and value.grad != 0 for value in learned.parameters())
    fixed = objectives[name](learned=False)
    assert not [value for value in fixed.parameters() if value.requires_grad]


def test_the_scale_stays_at_or_below_its_bound_and_can_come_back() -> None:
    objective = objectives["infonce"]()
    with torch.no_grad():
        objective.scale.log.fill_(6.0)  # a step too far: e⁶ is above 100
    wrong = objective.compute(-0.2 * torch.eye(4), torch.eye(4).bool(), Context())
    assert float(wrong.diagnostics["infonce/temperature"]) == pytest.approx(0.01, rel=1e-5)
    wrong.loss.backward()
    assert objective.scale.log.grad > 0


def test_a_learned_temperature_is_saved_with_the_objective() -> None:
    objective = create_objective({"infonce": {"temperature": 0.05}})
    restored = create_objective("infonce")
    restored.load_state_dict(objective.state_dict())
    case = make_case(list(range(4)))
    assert torch.equal(case.loss(restored), case.loss(objective))


@pytest.mark.parametrize("temperature", [0.0, -0.1, 0.001])
def test_an_impossible_temperature_is_refused(temperature) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        objectives["infonce"](temperature=temperature)


def test_a_small_constant_temperature_is_allowed() -> None:
    case = make_case(list(range(4)))
    assert case.loss(objectives["infonce"](temperature=0.001, learned=False)).isfinite()
