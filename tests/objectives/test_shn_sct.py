"""SHN and SCT: parity with the class-label reference, and the paper's equations by loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.objectives import Anchors, Context, objectives
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.objectives.cases import cases


def class_anchors(similarity: torch.Tensor, labels: torch.Tensor) -> Anchors:
    """Each item against all others, with its easiest positive: the most similar of its class."""
    same = labels[:, None] == labels[None, :]
    others = same & ~torch.eye(len(labels), dtype=torch.bool)
    return Anchors(similarity.masked_fill(~others, -torch.inf).amax(1), similarity, ~same)


@pytest.mark.parametrize(("name", "option"), [("shn", "shn"), ("sct", "sct.lam1")])
def test_reference_forms_agree_with_the_reference_with_gradients(name, option) -> None:
    fixture = load_fixture("loss-shn-sct")
    features = fixture["in.features"].double().requires_grad_()
    unit = torch.nn.functional.normalize(features, dim=1)
    options = {"temperature": fixture.hyper["temperature"]}
    if name == "sct":
        options["hard_similarity"] = fixture.hyper["hard_similarity"]
        options["lam"] = float(fixture.options[option]["lam"])
    objective = objectives[name](form="reference", **options)
    loss = objective.loss(class_anchors(unit @ unit.T, fixture["in.labels"]))
    assert_close(loss, fixture[f"out.{option}.loss"], 1e-7)
    loss.backward()
    assert_gradient_close(features.grad, fixture[f"grad.{option}.features"], 1e-6)


def shn_cost(p: float, negatives: list[float], cost) -> float | None:
    below = [n for n in negatives if n < p]
    return cost(p, max(below)) if below else None


def sct_cost(p: float, negatives: list[float], cost, lam: float, reference: bool) -> float | None:
    if not negatives:
        return None
    n = max(negatives)
    hard = n > p or n > 0.8 if reference else not n < p
    return lam * n if hard else cost(p, n)


def hinge(p: float, n: float) -> float:
    return max(0.0, n - p + 0.2)


def nca(p: float, n: float) -> float:
    return -math.log(math.exp(p / 0.1) / (math.exp(p / 0.1) + math.exp(n / 0.1)))


@given(case=cases(), form=st.sampled_from(["paper", "reference"]), lam=st.sampled_from([1.0, 0.5]))
def test_both_losses_equal_a_naive_loop(case, form, lam) -> None:
    cost = hinge if form == "paper" else nca
    shn = [shn_cost(p, negatives, cost) for p, negatives in case.anchors()]
    sct = [
        sct_cost(p, negatives, cost, lam, form == "reference") for p, negatives in case.anchors()
    ]
    for costs, objective in (
        (shn, objectives["shn"](form=form)),
        (sct, objectives["sct"](form=form, lam=lam)),
    ):
        counted = [value for value in costs if value is not None]
        divisor = 1 if form == "paper" else max(len(counted), 1)
        assert float(case.loss(objective)) == pytest.approx(sum(counted) / divisor, abs=1e-8)


@given(case=cases())
def test_a_mean_in_the_papers_form_counts_every_anchor(case) -> None:
    for name in ("shn", "sct"):
        total, mean = (case.loss(objectives[name](reduction=how)) for how in ("sum", "mean"))
        assert float(mean) == pytest.approx(float(total) / len(case.anchors()), abs=1e-9)


def test_semi_hard_mining_never_touches_a_negative_above_the_positive() -> None:
    scores = torch.tensor([[0.5, 0.9, 0.4], [0.1, 0.5, 0.2], [0.3, 0.0, 0.5]], requires_grad=True)
    objectives["shn"](margin=0.6).compute(scores, torch.eye(3).bool(), Context()).loss.backward()
    assert scores.grad[0, 1] == 0
    assert scores.grad[0, 2] > 0


def test_the_contrastive_branch_pushes_the_negative_and_leaves_the_positive_alone() -> None:
    scores = torch.tensor([[0.5, 0.9], [0.1, 0.8]], requires_grad=True)
    objectives["sct"](margin=0.0).compute(scores, torch.eye(2).bool(), Context()).loss.backward()
    assert torch.equal(scores.grad, torch.tensor([[0.0, 2.0], [0.0, 0.0]]))


def test_a_tie_is_hard_in_the_papers_form_and_easy_in_the_reference() -> None:
    tied = torch.tensor([0.5])
    assert float(objectives["sct"]().costs(tied, tied)) == pytest.approx(0.5)
    easy = objectives["sct"](form="reference").costs(tied, tied)
    assert float(easy) == pytest.approx(math.log(2))


def test_the_reference_form_calls_a_very_similar_negative_hard_wherever_the_positive_is() -> None:
    positive, negative = torch.tensor([0.9]), torch.tensor([0.85])
    reference = objectives["sct"](form="reference")
    assert float(reference.costs(positive, negative)) == pytest.approx(0.85)
    lenient = objectives["sct"](form="reference", hard_similarity=0.87)
    assert float(lenient.costs(positive, negative)) == pytest.approx(nca(0.9, 0.85), rel=1e-5)
    assert float(objectives["sct"]().costs(positive, negative)) == pytest.approx(0.15, rel=1e-5)
