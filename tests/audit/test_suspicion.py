"""The suspicion score: what is usual, what is evidence, how evidence adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.audit.suspicion import (
    MIN_NAMED_EVIDENCE,
    Scale,
    combine,
    evidence,
)

values = st.lists(st.floats(-100, 100), min_size=1, max_size=40).map(np.array)
shares = st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=20).map(np.array)


@given(values, st.floats(0.1, 10), st.floats(-5, 5))
def test_deviations_do_not_depend_on_the_unit_of_the_scores(drawn, factor, shift) -> None:
    drawn = np.round(drawn, 2)
    moved = factor * drawn + shift
    mine, theirs = Scale.of(drawn).z(drawn), Scale.of(moved).z(moved)
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_a_few_wild_values_do_not_change_what_is_usual() -> None:
    calm = np.random.default_rng(0).normal(size=1000)
    wild = np.concatenate([calm, np.full(100, -1e6)])
    assert Scale.of(wild).spread == pytest.approx(Scale.of(calm).spread, rel=0.3)
    assert Scale.of(calm).spread == pytest.approx(1.0, abs=0.1)


def test_values_that_do_not_vary_are_no_evidence() -> None:
    same = np.full(5, 0.3)
    assert (Scale.of(same).z(same) == 0).all()
    mostly = np.array([1.0] * 9 + [5.0])
    assert Scale.of(mostly).z(mostly)[-1] > 2.5


def test_three_deviations_are_even_odds() -> None:
    found = evidence(np.array([-np.inf, 0.0, 3.0, 6.0, 1e9]))
    assert found[0] < 1e-12
    assert found[1] < 0.05
    assert found[2] == 0.5
    assert found[3] > 0.95
    assert found[4] == 1.0


@given(shares)
def test_more_evidence_never_makes_a_caption_less_suspicious(signs) -> None:
    whole = combine(signs)
    assert (whole >= signs.max(1) - 1e-12).all()
    assert (whole <= 1).all()
    assert (combine(np.minimum(signs + 0.1, 1)) >= whole - 1e-12).all()
    assert (signs.max(1)[whole >= 0.5] >= MIN_NAMED_EVIDENCE).all()
