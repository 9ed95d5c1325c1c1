"""The watch over collapsed training: when it speaks, what it says, and that it remembers."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from counterfoil.objectives import Context, both_directions, create_objective
from counterfoil.training.collapse import CollapseWatch
from counterfoil.training.diagnostics import score_diagnostics

HARDEST = {"hardest": {}}
UNINFORMED = 51.2
COLLAPSED = (51.5, UNINFORMED, 0.001)
LEARNING = (30.0, UNINFORMED, 0.15)


def feed(watch, updates, first: int = 1, negative_selection: str = "hardest") -> dict[int, str]:
    """What was said, by step."""
    said = {}
    for step, (loss, loss_at_equal_scores, gap) in enumerate(updates, first):
        text = watch.update(step, loss, loss_at_equal_scores, gap, negative_selection)
        if text is not None:
            said[step] = text
    return said


def test_it_warns_once_after_patience_collapsed_updates() -> None:
    said = feed(CollapseWatch(HARDEST, patience=5), [LEARNING] * 2 + [COLLAPSED] * 40)
    assert list(said) == [7]
    assert "since step 3" in said[7]


def test_a_single_good_update_starts_the_count_anew() -> None:
    updates = ([COLLAPSED] * 4 + [LEARNING]) * 10
    assert feed(CollapseWatch(HARDEST, patience=5), updates) == {}


@pytest.mark.parametrize(
    "update",
    [
        (UNINFORMED, UNINFORMED, 0.1),  # as many anchors win as lose: learning, not collapsed
        (60.0, UNINFORMED, 0.001),
        (40.0, UNINFORMED, 0.001),
        (UNINFORMED, None, 0.001),
        (UNINFORMED, UNINFORMED, None),
    ],
)
def test_both_signs_are_needed(update) -> None:
    assert feed(CollapseWatch(HARDEST, patience=5), [update] * 50) == {}


def test_it_says_once_when_the_run_has_recovered_and_may_warn_again() -> None:
    updates = [COLLAPSED] * 20 + [LEARNING] * 20 + [COLLAPSED] * 20
    said = feed(CollapseWatch(HARDEST, patience=5), updates)
    assert list(said) == [5, 25, 45]
    assert said[25].startswith("recovered at step 21")
    assert "collapsed" in said[5]
    assert "since step 41" in said[45]


def test_a_short_way_out_is_no_recovery() -> None:
    updates = [COLLAPSED] * 20 + ([LEARNING] * 4 + [COLLAPSED]) * 10
    assert list(feed(CollapseWatch(HARDEST, patience=5), updates)) == [5]


def test_between_logged_updates_the_last_gap_holds() -> None:
    loss, loss_at_equal_scores, gap = COLLAPSED
    rare = [(loss, loss_at_equal_scores, gap if step % 10 == 0 else None) for step in range(1, 40)]
    assert list(feed(CollapseWatch(HARDEST, patience=15), rare)) == [10 + 14]


def test_updates_that_cannot_be_judged_count_for_neither_side() -> None:
    updates = [COLLAPSED] * 3 + [(51.2, None, 0.5)] * 20 + [COLLAPSED] * 3
    assert list(feed(CollapseWatch(HARDEST, patience=5), updates)) == [25]


@pytest.mark.parametrize(
    ("negative_selection", "offered", "kept_back"),
    [
        ("hardest", ["objective=selhn", "warmup_epochs=1", "optimizer.lr", "3.2"], ["epsilon"]),
        (
            "adaptive",
            ["epsilon", "optimizer.lr", "batch_size", "3.2"],
            ["objective=selhn", "warmup"],
        ),
        ("all", ["optimizer.lr"], ["objective=selhn", "hardest negative is chosen"]),
    ],
)
def test_the_remedy_fits_the_objective(negative_selection, offered, kept_back) -> None:
    name = "selhn" if negative_selection == "adaptive" else "hardest"
    watch = CollapseWatch({name: {}}, patience=1, slower=1)
    [text] = feed(watch, [COLLAPSED], negative_selection=negative_selection).values()
    assert all(part in text for part in offered)
    assert not any(part in text for part in kept_back)


@pytest.mark.parametrize(
    ("separation", "gap", "warns"),
    [(0.5, 0.01, True), (0.7, 0.01, True), (0.93, 0.01, False), (0.93, 0.001, True)],
)
def test_scores_that_rank_pairs_are_no_collapse_unless_they_are_all_but_equal(
    separation, gap, warns
) -> None:
    """NAAF's first epochs: a loss near that of equal scores and small gaps, dev RSUM rising."""
    watch = CollapseWatch(HARDEST, patience=5)
    said = [watch.update(step, 51.0, UNINFORMED, gap, "hardest", separation) for step in range(9)]
    assert any(said) == warns


@pytest.mark.parametrize(
    ("objective", "offered", "kept_back"),
    [
        ({"hardest": {}}, ["objective=selhn", "warmup_epochs=1"], []),
        ({"hardest": 1.0, "vse-c": {}}, ["objective=selhn", "warmup_epochs=1"], []),
        ({"hardest": {"warmup_epochs": 1}}, ["objective=selhn", "optimizer.lr"], ["warmup"]),
        ({"sel": {}}, ["objective=selhn"], ["warmup"]),
        ({"hardest": {"warmup_epochs": 2}, "selhn": {}}, ["optimizer.lr"], ["=selhn", "warmup"]),
    ],
)
def test_nothing_is_recommended_that_the_run_already_has(objective, offered, kept_back) -> None:
    watch = CollapseWatch(objective, patience=1)
    [text] = feed(watch, [COLLAPSED]).values()
    assert all(part in text for part in offered)
    assert not any(part in text for part in kept_back)


kinds = st.sampled_from([COLLAPSED, LEARNING, (51.3, UNINFORMED, None), (51.3, None, None)])


@given(updates=st.lists(kinds, max_size=40), cut=st.integers(0, 40), patience=st.integers(1, 6))
def test_a_resumed_run_says_what_an_unbroken_one_says(updates, cut, patience) -> None:
    whole = feed(CollapseWatch(HARDEST, patience=patience), updates)
    before, after = (CollapseWatch(HARDEST, patience=patience) for _ in range(2))
    said = feed(before, updates[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert {**said, **feed(after, updates[cut:], first=len(updates[:cut]) + 1)} == whole


@pytest.mark.parametrize(("spread", "warns"), [(1e-3, True), (1e-1, True), (1.0, False)])
def test_real_embeddings_around_one_point_are_a_collapse(spread, warns) -> None:
    """All images near one point and all texts near another, 64 numbers each."""
    generator = torch.Generator().manual_seed(0)
    objective, watch = create_objective("hardest"), CollapseWatch(HARDEST, patience=3)
    points = torch.randn(2, 1, 64, generator=generator)
    positives, said = torch.eye(32).bool(), []
    for step in range(5):
        noise = torch.randn(2, 32, 64, generator=generator)
        images, texts = F.normalize(points + 0.1 * spread * noise, dim=-1)
        scores = images @ texts.T
        loss = float(objective.compute(scores, positives, Context()).loss)
        gap = float(score_diagnostics(both_directions(scores, positives))["gap/abs"])
        said.append(watch.update(step, loss, 2 * 32 * 0.2, gap, "hardest"))
    assert any(said) == warns


@pytest.mark.parametrize("negative_selection", ["adaptive", "all"])
def test_objectives_that_lead_out_by_themselves_get_more_time(negative_selection) -> None:
    plateau = [COLLAPSED] * 24 + [LEARNING] * 20
    assert (
        feed(
            CollapseWatch(HARDEST, patience=5, slower=5),
            plateau,
            negative_selection=negative_selection,
        )
        == {}
    )
    stuck = feed(
        CollapseWatch(HARDEST, patience=5, slower=5),
        [COLLAPSED] * 40,
        negative_selection=negative_selection,
    )
    assert list(stuck) == [25]
    updates = [COLLAPSED] * 30 + [LEARNING] * 9
    over = feed(CollapseWatch(HARDEST, patience=5), updates, negative_selection=negative_selection)
    assert list(over) == [25, 35]
