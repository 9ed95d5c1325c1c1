"""SSP: parity, a naive loop, and what crashes in the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from counterfoil.core.errors import ConfigError
from counterfoil.objectives import Context, create_objective, objectives
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.objectives.cases import cases


def test_the_loss_agrees_with_the_reference_with_gradients() -> None:
    fixture = load_fixture("loss-ssp")
    scores = fixture["in.scores"].double().requires_grad_()
    objective = objectives["ssp"](
        margin=fixture.hyper["margin"], positive=fixture.hyper["pos"], negative=fixture.hyper["neg"]
    )
    loss = objective.compute(scores, torch.eye(len(scores)).bool(), Context()).loss
    assert_close(loss, fixture["out.loss"], 1e-9)
    loss.backward()
    assert_gradient_close(scores.grad, fixture["grad.scores"], 1e-6)


@given(case=cases())
def test_the_loss_equals_a_naive_loop(case) -> None:
    total = 0.0
    for p, negatives in case.anchors():
        if negatives and max(negatives) > p - 0.2 and p < 1 - 1e-5:
            n = max(negatives)
            total += max(0.0, 0.2 * p**2 - 0.7 * p + 0.5) + max(0.0, 0.9 * n**2 - 0.4 * n + 0.03)
    expected = total / (len(case.anchors()) / 2)
    assert float(case.loss(objectives["ssp"]())) == pytest.approx(expected, abs=1e-9)


def test_a_batch_of_perfect_positives_costs_nothing_and_stays_finite() -> None:
    scores = torch.ones(3, 3, requires_grad=True)
    loss = objectives["ssp"]().compute(scores, torch.eye(3).bool(), Context()).loss
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(scores.grad, torch.zeros(3, 3))


def test_coefficients_are_options_of_any_degree() -> None:
    scores = torch.tensor([[0.5, 0.6], [0.0, 0.5]])
    constant = create_objective({"ssp": {"positive": [1.5], "negative": [2.0, 0.0, 0.0, 0.0]}})
    loss = constant.compute(scores, torch.eye(2).bool(), Context()).loss
    # Row 0 and column 1 violate the margin with 0.6, row 1 and column 0 do not.
    assert float(loss) == pytest.approx((2 * 1.5 + 2 * 2 * 0.6**3) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positive": []}, "ssp.positive: expected a list of numbers"),
        ({"negative": "abc"}, "ssp.negative: "),
        ({"positive": [0.1, float("nan")]}, "ssp.positive: expected"),
    ],
)
def test_coefficients_are_checked(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_objective({"ssp": options})
