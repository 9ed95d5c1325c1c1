"""What holds for every registered objective that needs no more than scores."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from counterfoil.core.errors import ArgumentError
from counterfoil.objectives import Context, create_objective, objectives
from tests.objectives.cases import Case, make_case

NAMES = [name for name in objectives if not objectives[name].requires]

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
    report = objective.compute(scores, case.positives, case.context)
    assert report.loss.shape == ()
    assert report.loss.isfinite()
    report.loss.backward()
    assert scores.grad.dtype == dtype
    assert scores.grad.isfinite().all()
    for parameter in objective.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_scores_in_half_precision_computes_in_single_precision(name, dtype) -> None:
    """A sum over 600 x 599 negatives is beyond the largest number of float16."""
    scores = torch.rand(600, 600, generator=torch.Generator().manual_seed(0)).to(dtype)
    objective = objectives[name]()
    loss = objective(scores)
    assert loss.dtype == torch.float32
    assert loss == objective(scores.float())


@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_are_finite_scalars_without_gradients(name) -> None:
    case = CASES["an ordinary batch"]
    scores = case.scores.clone().requires_grad_()
    report = objectives[name]().compute(scores, case.positives, case.context)
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
        objective.compute(scores, case.positives, case.context).loss.backward()
        assert (scores.grad[case.protected] == 0).all()
        square = case.scores.shape[0] == case.scores.shape[1]
        own = torch.eye(len(scores)).bool() if square else case.positives
        assert (scores.grad[case.positives & ~own] <= 0).all()


INFORMED = [name for name in NAMES if objectives[name]().loss_at_equal_scores(5, 4) is not None]


@pytest.mark.parametrize("name", INFORMED)
def test_the_uninformed_loss_is_the_loss_of_equal_scores(name) -> None:
    for options in [{}, {"reduction": "mean"}, {"reduction": "sum"}]:
        if not options.keys() <= objectives.options(name).keys():
            continue
        objective = objectives[name](**options)
        for value in (0.0, 0.3):
            scores = torch.full((5, 5), value, dtype=torch.float64)
            loss = objective.compute(scores, torch.eye(5).bool(), Context()).loss
            assert loss.item() == pytest.approx(objective.loss_at_equal_scores(5, 4), rel=1e-6)


def test_most_objectives_know_their_uninformed_loss() -> None:
    assert {"hardest", "triplet", "selhn", "sel", "infonce"} <= set(INFORMED)


def test_the_uninformed_losses_are_those_of_the_papers() -> None:
    assert objectives["triplet"](margin=0.3).loss_at_equal_scores(8, 7) == pytest.approx(
        2 * 8 * 7 * 0.3
    )
    assert objectives["hardest"](margin=0.3).loss_at_equal_scores(8, 7) == pytest.approx(
        2 * 8 * 0.3
    )
    assert objectives["selhn"](margin=0.3).loss_at_equal_scores(8, 7) == pytest.approx(0.3)
    assert objectives["sel"](hardest=False).loss_at_equal_scores(8, 7) == pytest.approx(
        2 * 8 * 7 * 0.2
    )
    assert objectives["infonce"](form="chan", margin=0.1, learned=False).loss_at_equal_scores(
        8, 7
    ) == pytest.approx(2 * float(torch.log(1 + 7 * torch.tensor(0.1 / 0.07).exp())), rel=1e-6)
    assert objectives["shn"]().loss_at_equal_scores(8, 7) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_call_gives_the_loss_of_training(name) -> None:
    objective, ids = objectives[name](), torch.tensor([0, 0, 1, 2, 2, 3])
    case = make_case(ids.tolist(), scale=0.3, protected=0.2)
    trained = objective.compute(case.scores, case.positives, Context())
    for given in [(ids,), (case.positives,)]:
        assert torch.equal(objective(case.scores, *given), trained.loss)
    assert torch.equal(objective(case.scores, image_ids=ids), trained.loss)
    diagonal = objective.compute(case.scores, torch.eye(6).bool(), Context()).loss
    assert torch.equal(objective(case.scores), diagonal)
    report = objective.report(case.scores, ids)
    assert torch.equal(report.loss, trained.loss)
    assert report.diagnostics.keys() == trained.diagnostics.keys()
    late = Context(epoch=3, step=5, protected=case.protected)
    expected = objective.compute(case.scores, case.positives, late).loss
    given_all = objective(case.scores, ids, protected=case.protected, epoch=3, step=5)
    assert torch.equal(given_all, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_call_refuses_what_it_cannot_use(name) -> None:
    objective, scores = objectives[name](), torch.zeros(3, 3)
    for wrong in [torch.zeros(3, 3).bool(), torch.eye(3).long(), torch.arange(2)]:
        with pytest.raises(ArgumentError, match="expected"):
            objective(scores, wrong)
    with pytest.raises(ArgumentError, match="expected a matrix"):
        objective(torch.zeros(3))
    with pytest.raises(ArgumentError, match="protected: expected a boolean matrix"):
        objective(scores, protected=torch.zeros(3, 3))


@pytest.mark.parametrize("name", NAMES)
def test_scores_that_are_not_numbers_are_refused(name) -> None:
    scores = torch.eye(4)
    scores[1, 1] = torch.nan
    with pytest.raises(ArgumentError, match="expected numbers, 1 of 16 are NaN"):
        objectives[name]()(scores)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_infinite_scores_are_refused(name, value) -> None:
    """With -inf as a mask, ssp had a loss of 0 and gradients of NaN, shn a cost for no negative."""
    scores = torch.eye(4)
    scores[1, 0] = scores[0, 1] = value
    with pytest.raises(ArgumentError, match="2 of 16 are infinite; exclude pairs by protected="):
        objectives[name]()(scores)


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3)], ids=repr)
def test_an_epoch_may_be_a_whole_number_of_any_kind(value) -> None:
    objective, scores = create_objective({"hardest": {"warmup_epochs": 2}}), torch.eye(3) / 4
    assert torch.equal(objective(scores, epoch=value, step=value), objective(scores, epoch=3))


@pytest.mark.parametrize("value", ["1", 1.0, -1, True, None, torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("key", ["epoch", "step"])
@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_or_a_step_that_is_no_count_is_refused(name, key, value) -> None:
    objective, scores = objectives[name](), torch.eye(3)
    for call in (objective, objective.report, create_objective(name)):
        with pytest.raises(ArgumentError, match=f"^{key}: expected a whole number of at least 0, "):
            call(scores, **{key: value})
    assert objective(scores, **{key: np.int64(1)}) == objective(scores, **{key: 1})


NEEDED = {"ndgl": {"guide": "guides/ab"}, "aoq": {"first": "runs/a"}}


@pytest.mark.parametrize("name", sorted(set(objectives) - set(NAMES)))
def test_an_objective_that_needs_more_than_scores_says_what(name) -> None:
    objective = objectives[name](**NEEDED.get(name, {}))
    with pytest.raises(ArgumentError, match="cannot be computed from scores alone: it reads "):
        objective(torch.eye(3))
    both = create_objective({"hardest": 1.0, name: NEEDED.get(name, {})})
    with pytest.raises(ArgumentError, match=re.escape(f"{objective.requires} ({name})")):
        both(torch.eye(3))


def test_a_weighted_sum_of_objectives_is_called_as_one_of_them() -> None:
    scores = make_case([0, 0, 1, 2], scale=0.3).scores
    both = create_objective({"hardest": 1.0, "infonce": 0.5})
    parts = [term(scores, [0, 0, 1, 2]) for _, term in both.each()]
    assert torch.allclose(both(scores, [0, 0, 1, 2]), parts[0] + 0.5 * parts[1])
