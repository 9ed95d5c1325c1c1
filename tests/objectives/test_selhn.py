"""SelHN: parity, its two limits, and the branch each anchor takes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.objectives import Context, objectives
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.objectives.cases import Case, cases, make_case

REDUCTIONS = ["mean", "sum"]


@pytest.mark.parametrize("name", ["eps0.01", "eps0", "eps9_other_batch_size"])
def test_the_loss_agrees_with_the_reference_with_gradients(name) -> None:
    fixture = load_fixture("loss-selhn")
    images = fixture["in.img_emb"].double().requires_grad_()
    texts = fixture["in.cap_emb"].double().requires_grad_()
    option = fixture.options[name]
    objective = objectives["selhn"](margin=option["margin"], epsilon=option["epsilon"])
    loss = objective.compute(images @ texts.T, torch.eye(len(images)).bool(), Context()).loss
    assert_close(loss, fixture[f"out.{name}.loss"], 1e-9)
    loss.backward()
    assert_gradient_close(images.grad, fixture[f"grad.{name}.img_emb"], 1e-6)
    assert_gradient_close(texts.grad, fixture[f"grad.{name}.cap_emb"], 1e-6)


def test_the_fixture_has_seven_rows_and_three_columns_that_average() -> None:
    fixture = load_fixture("loss-selhn")
    scores = fixture["in.img_emb"].double() @ fixture["in.cap_emb"].double().T
    report = objectives["selhn"]().compute(scores, torch.eye(12).bool(), Context())
    assert float(report.diagnostics["selhn/averaged"]) == pytest.approx(10 / 24)


def smallest_gap(case: Case) -> float:
    return min((abs(p - max(n)) for p, n in case.anchors() if n), default=1.0)


def largest_gap(case: Case) -> float:
    return max((abs(p - max(n)) for p, n in case.anchors() if n), default=1.0)


def assert_same(case: Case, one, other) -> None:
    (loss, gradient), (expected, its_gradient) = (
        case.loss_and_gradient(one),
        case.loss_and_gradient(other),
    )
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, its_gradient)


@given(case=cases(), reduction=st.sampled_from(REDUCTIONS), zero=st.booleans())
def test_a_vanishing_epsilon_is_exactly_the_hardest_loss(case, reduction, zero) -> None:
    epsilon = 0.0 if zero else smallest_gap(case)
    selective = objectives["selhn"](epsilon=epsilon, reduction=reduction)
    assert_same(case, selective, objectives["hardest"](reduction=reduction))


@given(case=cases(), infinite=st.booleans())
def test_a_growing_epsilon_is_exactly_the_mean_triplet_loss(case, infinite) -> None:
    epsilon = math.inf if infinite else 2 * largest_gap(case)
    assert_same(case, objectives["selhn"](epsilon=epsilon), objectives["triplet"](reduction="mean"))


def test_ties_take_the_hardest_negative_when_epsilon_is_zero() -> None:
    case = make_case(list(range(5)), scale=0.0)
    assert_same(case, objectives["selhn"](epsilon=0.0), objectives["hardest"](reduction="mean"))


@given(case=cases(), reduction=st.sampled_from(REDUCTIONS), epsilon=st.floats(0.01, 0.8))
def test_the_loss_equals_a_naive_loop(case, reduction, epsilon) -> None:
    costs = []
    for positive, negatives in case.anchors():
        hinges = [max(0.0, 0.2 + n - positive) for n in negatives]
        if not negatives:
            costs.append(0.0)
        elif abs(positive - max(negatives)) < epsilon:
            costs.append(sum(hinges) / len(hinges))
        else:
            costs.append(max(hinges))
    expected = sum(costs) / (len(costs) if reduction == "mean" else 1)
    loss = case.loss(objectives["selhn"](epsilon=epsilon, reduction=reduction))
    assert float(loss) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_gives_nearly_the_same_loss(dtype) -> None:
    case = make_case([0, 0, 1, 2, 3, 4])
    objective = objectives["selhn"](epsilon=0.05)
    rounded = case.scores.to(dtype)
    low = objective.compute(rounded, case.positives, Context()).loss
    exact = objective.compute(rounded.double(), case.positives, Context()).loss
    assert float(low) == pytest.approx(float(exact), rel=2e-2)
