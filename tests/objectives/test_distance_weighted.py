"""Distance-weighted sampling: who is drawn, how often, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from counterfoil.objectives import Anchors, Context, objectives
from tests.objectives.cases import cases, make_case


def density(distance: float, dimension: int) -> float:
    """How common a distance is between random points of the unit sphere, up to a factor."""
    return distance ** (dimension - 2) * (1 - distance**2 / 4) ** ((dimension - 3) / 2)


def one_anchor(distances: list[float], negative: list[bool] | None = None) -> Anchors:
    scores = 1 - torch.tensor([distances], dtype=torch.float64) ** 2 / 2
    allowed = torch.tensor([negative or [True] * len(distances)])
    return Anchors(torch.ones(1, dtype=torch.float64), scores, allowed)


def test_negatives_are_drawn_in_inverse_proportion_to_how_common_their_distance_is() -> None:
    distances, dimension = [0.2, 0.5, 0.6, 0.8, 1.2, 1.65, 1.8], 6
    anchors = one_anchor(distances, [True] * 3 + [False] + [True] * 3)
    seen = [max(d, 0.5) for d in distances]  # nearer than the cut-off counts as the cut-off
    rarity = [1 / density(d, dimension) if d < 1.7 and d != 0.8 else 0.0 for d in seen]
    expected = torch.tensor(rarity, dtype=torch.float64) / sum(rarity)
    objective = objectives["distance-weighted"](dimension=dimension)
    assert torch.allclose(objective.probabilities(anchors)[0], expected, rtol=1e-9)

    draws = 20_000
    many = Anchors(
        anchors.positive.expand(draws),
        anchors.scores.expand(draws, -1),
        anchors.is_negative.expand(draws, -1),
    )
    drawn = objective.weights(many, Context())
    assert torch.equal(drawn.sum(1), torch.ones(draws, dtype=torch.float64))
    deviation = (drawn.mean(0) - expected).abs()
    assert (deviation <= 4 * (expected * (1 - expected) / draws).sqrt()).all()


def test_weights_in_many_dimensions_neither_overflow_nor_vanish() -> None:
    odds = objectives["distance-weighted"](dimension=512).probabilities(
        one_anchor([0.5, 0.51, 1.3, 1.69])
    )
    exact = [-510 * math.log(d) - 254.5 * math.log(1 - d * d / 4) for d in (0.5, 0.51)]
    assert float(odds[0, 1] / odds[0, 0]) == pytest.approx(math.exp(exact[1] - exact[0]), rel=1e-6)
    assert float(odds.sum()) == pytest.approx(1)


@given(case=cases(scale=0.3))
def test_only_true_negatives_within_reach_are_ever_drawn(case) -> None:
    objective = objectives["distance-weighted"](dimension=8)
    for anchors in objective.anchors(case.scores, case.positives, case.context):
        reachable = anchors.is_negative & ((2 - 2 * anchors.scores).clamp(min=0).sqrt() < 1.7)
        for _ in range(3):
            drawn = objective.weights(anchors, case.context)
            assert (drawn[~reachable] == 0).all()
            assert torch.equal(drawn.sum(1) > 0, reachable.any(1))


def test_the_loss_is_the_hinge_on_the_drawn_negatives() -> None:
    case, objective = make_case([0, 0, 1, 2, 3], scale=0.3), objectives["distance-weighted"]()
    expected = 0.0
    for anchors in objective.anchors(case.scores, case.positives, case.context):
        chosen = objective.weights(anchors, case.context).argmax(1).tolist()
        for row, column in enumerate(chosen):
            gap = anchors.scores[row, column] - anchors.positive[row]
            expected += max(0.0, 0.2 + float(gap))
    assert float(case.loss(objective)) == pytest.approx(expected)


def test_draws_depend_on_the_step_and_on_nothing_else() -> None:
    anchors = one_anchor([0.6, 0.8, 1.0, 1.2])
    many = Anchors(
        anchors.positive.expand(50),
        anchors.scores.expand(50, -1),
        anchors.is_negative.expand(50, -1),
    )
    objective = objectives["distance-weighted"](dimension=6)
    torch.manual_seed(3)
    first = objective.weights(many, Context(step=7))
    torch.manual_seed(4)
    assert torch.equal(objective.weights(many, Context(step=7)), first)
    assert not torch.equal(objective.weights(many, Context(step=8)), first)


def test_anchors_out_of_reach_of_every_negative_cost_nothing() -> None:
    scores = torch.tensor([[-0.9, -0.9], [-0.9, -0.9]], requires_grad=True)
    loss = objectives["distance-weighted"]().compute(scores, torch.eye(2).bool(), Context()).loss
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad.isfinite().all()
