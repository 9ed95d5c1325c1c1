"""What holds for every registered objective that needs no more than scores."""

from __future__ import annotations

import pytest
import torch

from counterfoil.objectives import Context, objectives
from tests.objectives.cases import Case, make_case

NAMES = [name for name in objectives if not objectives[name].needs_batch]

CASES = {
    "an ordinary batch": make_case(list(range(6)), scale=0.3),
    "repeated images": make_case([0, 0, 1, 2, 2, 2], scale=0.3),
    "one image only": make_case([0, 0, 0]),
    "several texts per image": make_case([0, 0, 1, 1, 1, 2], square=False, scale=0.3),
    "a single pair": make_case([0]),
    "one image with several texts": make_case([0, 0, 0], square=False),
    "some pairs protected": make_case([0, 0, 1, 2, 3, 4], protected=0.4, scale=0.3),
    "everything protected": make_case(list(range(5)), protected=1.1, scale=0.3),
    "all scores equal": make_case(list(range(5)), scale=0.0),
    "perfect scores": Case(
        torch.eye(5).double(), torch.eye(5).bool(), torch.zeros(5, 5, dtype=torch.bool)
    ),
    "tiny scores": make_case(list(range(5)), scale=1e-12),
    "huge scores": make_case(list(range(5)), scale=1e4),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("situation", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_finite(name, situation, dtype) -> None:
    case, objective = CASES[situation], objectives[name]()
    scores = case.scores.to(dtype, copy=True).requires_grad_()
    report = objective(scores, case.positives, case.context)
    assert report.loss.shape == ()
    assert report.loss.isfinite()
    report.loss.backward()
    assert scores.grad.dtype == dtype
    assert scores.grad.isfinite().all()
    for parameter in objective.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_are_finite_scalars_without_gradients(name) -> None:
    case = CASES["an ordinary batch"]
    scores = case.scores.clone().requires_grad_()
    report = objectives[name]()(scores, case.positives, case.context)
    for value in report.diagnostics.values():
        assert value.shape == ()
        assert value.isfinite()
        assert not value.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_no_negative_is_learned_from_a_positive_or_a_protected_pair(name) -> None:
    """Raising the score of what is no negative never raises the loss."""
    for situation in ("repeated images", "some pairs protected", "several texts per image"):
        case, objective = CASES[situation], objectives[name]()
        scores = case.scores.clone().requires_grad_()
        objective(scores, case.positives, case.context).loss.backward()
        assert (scores.grad[case.protected] == 0).all()
        square = case.scores.shape[0] == case.scores.shape[1]
        own = torch.eye(len(scores)).bool() if square else case.positives
        assert (scores.grad[case.positives & ~own] <= 0).all()


INFORMED = [name for name in NAMES if objectives[name]().uninformed(5, 4) is not None]


@pytest.mark.parametrize("name", INFORMED)
def test_the_uninformed_loss_is_the_loss_of_equal_scores(name) -> None:
    for options in [{}, {"reduction": "mean"}, {"reduction": "sum"}]:
        if not options.keys() <= objectives.options(name).keys():
            continue
        objective = objectives[name](**options)
        for value in (0.0, 0.3):
            scores = torch.full((5, 5), value, dtype=torch.float64)
            loss = objective(scores, torch.eye(5).bool(), Context()).loss
            assert loss.item() == pytest.approx(objective.uninformed(5, 4), rel=1e-6)


def test_most_objectives_know_their_uninformed_loss() -> None:
    assert {"hardest", "triplet", "selhn", "sel", "infonce"} <= set(INFORMED)


def test_the_uninformed_losses_are_those_of_the_papers() -> None:
    assert objectives["triplet"](margin=0.3).uninformed(8, 7) == pytest.approx(2 * 8 * 7 * 0.3)
    assert objectives["hardest"](margin=0.3).uninformed(8, 7) == pytest.approx(2 * 8 * 0.3)
    assert objectives["selhn"](margin=0.3).uninformed(8, 7) == pytest.approx(0.3)
    assert objectives["sel"](hardest=False).uninformed(8, 7) == pytest.approx(2 * 8 * 7 * 0.2)
    assert objectives["infonce"](form="chan", margin=0.1, learned=False).uninformed(
        8, 7
    ) == pytest.approx(2 * float(torch.log(1 + 7 * torch.tensor(0.1 / 0.07).exp())), rel=1e-6)
    assert objectives["shn"]().uninformed(8, 7) is None
