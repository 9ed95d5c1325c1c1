"""Triplet objectives: parity, naive loops, and positives that come from image ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.matchers import matchers
from counterfoil.objectives import (
    Composite,
    Context,
    LossReport,
    Objective,
    create_objective,
    objectives,
)
from counterfoil.objectives.triplet import HardestNegative, HingeObjective, Triplet
from tests.conftest import assert_close, assert_gradient_close, load_fixture


def encoded(x: torch.Tensor) -> Encoded:
    return Encoded(None, torch.ones(len(x), 1, dtype=torch.bool), x)


@pytest.mark.parametrize("measure", ["cosine", "order"])
@pytest.mark.parametrize(("form", "name"), [("max", "hardest"), ("sum", "triplet")])
def test_losses_agree_with_the_reference_with_gradients(measure, form, name) -> None:
    fixture = load_fixture("loss-triplet")
    images = fixture["in.img_emb"].double().requires_grad_()
    texts = fixture["in.cap_emb"].double().requires_grad_()
    margin = fixture.options[f"{measure}.{form}"]["margin"]
    scores = matchers[measure](64)(encoded(images), encoded(texts))
    objective = create_objective({name: {"margin": margin}})
    loss = objective.compute(scores, torch.eye(len(scores), dtype=torch.bool), Context()).loss
    assert_close(loss, fixture[f"out.{measure}.{form}.loss"], 1e-6)
    loss.backward()
    assert_gradient_close(images.grad, fixture[f"grad.{measure}.{form}.img_emb"], 1e-6)
    assert_gradient_close(texts.grad, fixture[f"grad.{measure}.{form}.cap_emb"], 1e-6)


def naive(scores, ids, margin: float, hardest: bool) -> float:
    total = 0.0
    for i in range(len(ids)):
        others = [j for j in range(len(ids)) if ids[j] != ids[i]]
        by_text = [max(0.0, margin + scores[i][j] - scores[i][i]) for j in others]
        by_image = [max(0.0, margin + scores[j][i] - scores[i][i]) for j in others]
        for costs in (by_text, by_image):
            if costs:
                total += max(costs) if hardest else sum(costs)
    return total


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7),
    seed=st.integers(0, 1000),
    hardest=st.booleans(),
)
def test_both_losses_equal_a_naive_loop_with_repeated_images(ids, seed, hardest) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(ids), len(ids), generator=generator, dtype=torch.float64)
    owner = torch.tensor(ids)
    positives = owner[:, None] == owner[None, :]
    objective = create_objective("hardest" if hardest else "triplet")
    loss = objective.compute(scores, positives, Context()).loss
    assert float(loss) == pytest.approx(naive(scores.tolist(), ids, 0.2, hardest), abs=1e-9)


def test_two_captions_of_one_image_are_never_each_others_negatives() -> None:
    scores = torch.tensor([[1.0, 5.0, 0.0], [5.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    owner = torch.tensor([4, 4, 9])
    positives = owner[:, None] == owner[None, :]
    for name in ("triplet", "hardest"):
        assert float(create_objective(name).compute(scores, positives, Context()).loss) == 0.0


def test_the_loss_is_zero_when_pairs_are_separated_by_the_margin() -> None:
    scores = torch.eye(5)
    for name in ("triplet", "hardest"):
        assert (
            float(create_objective(name).compute(scores, torch.eye(5).bool(), Context()).loss)
            == 0.0
        )


def test_a_batch_without_negatives_costs_nothing_and_stays_finite() -> None:
    scores = torch.randn(3, 3, requires_grad=True)
    report = create_objective("hardest").compute(scores, torch.ones(3, 3).bool(), Context())
    report.loss.backward()
    assert report.loss.item() == 0.0
    assert scores.grad.isfinite().all()


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7),
    seed=st.integers(0, 1000),
    reduction=st.sampled_from(["sum", "mean"]),
)
def test_the_hardest_negatives_cost_and_teach_what_their_weights_say(ids, seed, reduction) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(ids), len(ids), generator=generator, dtype=torch.float64)
    scores = (scores * 3).round().requires_grad_()  # many are equal, of which one is chosen
    owner = torch.tensor(ids)
    positives = owner[:, None] == owner[None, :]
    hardest = objectives["hardest"](margin=0.3, reduction=reduction)
    directions = hardest.anchors(scores, positives, Context())
    result, expected = (
        hardest.cost(directions, Context()),
        HingeObjective.cost(hardest, directions, Context()),
    )
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad(loss, scores)[0] for loss in (result, expected)]
    torch.testing.assert_close(*gradients)


def test_warm_up_epochs_use_every_negative() -> None:
    scores, positives = torch.randn(6, 6), torch.eye(6).bool()
    warm = create_objective({"hardest": {"warmup_epochs": 2}})
    everyone, hardest = create_objective("triplet"), create_objective("hardest")
    early = warm.compute(scores, positives, Context(epoch=1)).loss
    late = warm.compute(scores, positives, Context(epoch=2)).loss
    assert torch.equal(early, everyone.compute(scores, positives, Context()).loss)
    assert torch.equal(late, hardest.compute(scores, positives, Context()).loss)


def test_mean_reduction_averages_over_anchors_and_chosen_negatives() -> None:
    scores, positives = torch.randn(6, 6), torch.eye(6).bool()
    total = create_objective("triplet").compute(scores, positives, Context()).loss
    mean = (
        create_objective({"triplet": {"reduction": "mean"}})
        .compute(scores, positives, Context())
        .loss
    )
    assert float(mean) == pytest.approx(float(total) / (2 * 6 * 5), rel=1e-5)


def test_images_with_several_texts_make_every_positive_an_anchor() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.7], [0.2, 0.3, 0.6, 0.5]])
    owner = torch.tensor([0, 0, 1, 1])
    positives = torch.arange(2)[:, None] == owner[None, :]
    loss = create_objective("triplet").compute(scores, positives, Context()).loss
    expected = 0.0
    for text, image in enumerate(owner.tolist()):
        own = scores[image, text]
        for other in range(4):
            if owner[other] != image:
                expected += max(0.0, 0.2 + scores[image, other] - own)
        expected += max(0.0, 0.2 + scores[1 - image, text] - own)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_composite_weighs_its_terms_and_honors_epoch_ranges() -> None:
    scores, positives = torch.randn(6, 6), torch.eye(6).bool()
    both = create_objective(
        {"hardest": 0.5, "triplet": {"weight": 2, "epochs": [1, 3], "margin": 0.1}}
    )
    hardest = create_objective("hardest").compute(scores, positives, Context()).loss
    triplet = (
        create_objective({"triplet": {"margin": 0.1}}).compute(scores, positives, Context()).loss
    )
    for epoch, expected in {
        0: 0.5 * hardest,
        1: 0.5 * hardest + 2 * triplet,
        3: 0.5 * hardest,
    }.items():
        assert torch.allclose(both.compute(scores, positives, Context(epoch=epoch)).loss, expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hardst", "did you mean 'hardest'"),
        ({"hardest": {"margn": 0.1}}, "objective.hardest.margn.*did you mean 'margin'"),
        ({"hardest": {"margin": "wide"}}, "objective.hardest.margin"),
        ({"hardest": {"reduction": "median"}}, "objective.hardest.reduction"),
        ({"hardest": {"epochs": [3, 1]}}, "objective.hardest.epochs"),
        ({}, "at least one"),
    ],
)
def test_a_wrong_objective_is_refused_with_the_nearest_name(spec, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_objective(spec)


def test_gradients_survive_extreme_scores() -> None:
    for scale in (1e-8, 1e4):
        scores = (l2_normalize(torch.randn(8, 8)) * scale).requires_grad_()
        create_objective("hardest").compute(scores, torch.eye(8).bool(), Context()).loss.backward()
        assert scores.grad.isfinite().all()


def test_the_manner_of_a_composite_is_that_of_what_leads_out() -> None:
    assert create_objective("hardest").negative_selection(0) == "hardest"
    assert create_objective({"hardest": {"warmup_epochs": 2}}).negative_selection(1) == "all"
    assert create_objective({"hardest": {"warmup_epochs": 2}}).negative_selection(2) == "hardest"
    assert create_objective({"hardest": 1, "selhn": 1}).negative_selection(0) == "adaptive"
    ranges = create_objective({"triplet": {"epochs": [0, 1]}, "hardest": {"epochs": [1, None]}})
    assert [ranges.negative_selection(epoch) for epoch in (0, 1)] == ["all", "hardest"]


def test_uninformed_follows_the_warm_up_and_the_ranges_of_epochs() -> None:
    warm = create_objective({"hardest": {"warmup_epochs": 1}})
    assert warm.loss_at_equal_scores(8, 7, 0) == pytest.approx(2 * 8 * 7 * 0.2)
    assert warm.loss_at_equal_scores(8, 7, 1) == pytest.approx(2 * 8 * 0.2)
    late = create_objective({"hardest": {"epochs": [2, None]}})
    assert late.loss_at_equal_scores(8, 7, 0) is None
    assert late.idle_epochs(4) == [0, 1]


class Watching(Objective):
    """Counts the epochs it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def begin_epoch(self, epoch, survey) -> None:
        self.seen.append(epoch)


def test_only_active_terms_hear_of_an_epoch() -> None:
    early, late = Watching(), Watching()
    both = Composite(
        {"early": early, "late": late},
        {"early": 1.0, "late": 1.0},
        {"early": (0, 2), "late": (1, None)},
    )
    for epoch in range(4):
        both.begin_epoch(epoch, lambda: iter(()))
    assert early.seen == [0, 1]
    assert late.seen == [1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [{"hardest": {"epochs": [-2, 3]}}, {"hardest": float("nan")}, {"selhn": {"epsilon": -1.0}}],
)
def test_numbers_that_make_no_sense_are_refused(bad) -> None:
    with pytest.raises(ConfigError):
        create_objective(bad)


def test_in_square_scores_other_positives_than_a_full_diagonal_are_only_not_negatives() -> None:
    scores = torch.tensor([[0.6, 0.5, 0.1], [0.3, 0.7, 0.2], [0.0, 0.1, 0.4]])
    repeated = [[True, True, False], [True, True, False], [False, False, True]]
    protected = (torch.tensor(repeated) & ~torch.eye(3).bool()).tolist()
    for objective in (Triplet(margin=0.5), HardestNegative(margin=0.5)):
        assert objective(scores, ["a", "a", "b"]) == objective(scores, repeated)
        assert objective(scores, repeated) == objective(scores, protected=protected)

    rolled = torch.tensor(repeated).roll(1, 0)  # not the whole diagonal: all five are pairs
    expected = 0.0
    for i, j in rolled.nonzero().tolist():
        others = [(i, k) for k in range(3) if not rolled[i, k]]
        others += [(k, j) for k in range(3) if not rolled[k, j]]
        expected += sum(max(0.0, 0.5 + float(scores[o] - scores[i, j])) for o in others)
    assert float(Triplet(margin=0.5)(scores, rolled)) == pytest.approx(expected)


def test_a_term_that_returns_no_report_is_named() -> None:
    class Plain(Objective):
        def compute(self, scores, positives, context):
            return -scores.diagonal().mean()

    both = Composite({"plain": Plain()}, {"plain": 1.0}, {"plain": (0, None)})
    with pytest.raises(ArgumentError, match=r"Plain\.compute: expected a LossReport, got Tensor"):
        both(torch.eye(3))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda scores: scores.mean(1), r"one of shape \[3\]"),
        (lambda scores: scores.mean().reshape(1), r"one of shape \[1\]"),
        (lambda _: 1.0, "1.0"),
        (lambda scores: (scores > 0).sum(), r"one of shape \[\]"),
    ],
)
def test_a_loss_that_is_not_one_number_is_named(loss, got) -> None:
    class Odd(Objective):
        def compute(self, scores, positives, context):
            return LossReport(loss(scores))

    both = Composite({"odd": Odd()}, {"odd": 1.0}, {"odd": (0, None)})
    for objective in (Odd(), both):
        with pytest.raises(ArgumentError, match=rf"Odd\.compute: expected the loss .* got {got}"):
            objective(torch.eye(3))
