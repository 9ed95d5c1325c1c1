"""The suspicion score: what is usual, what is evidence, how evidence adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import counterfoil as cf
from counterfoil.audit.suspicion import (
    MEASURED_SIGNS,
    SIGNS,
    WEIGHTS,
    Scale,
    combine,
    deviations_of,
    evidence,
    measure_effects,
)
from counterfoil.data.text.words import caption_words
from counterfoil.models.explain import explain
from counterfoil.models.word_effects import naming_method

values = st.lists(st.floats(-100, 100), min_size=1, max_size=40).map(np.array)
tables = st.lists(
    st.tuples(*[st.floats(-9, 9)] * len(MEASURED_SIGNS)), min_size=3, max_size=20
).map(np.array)


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


@given(tables)
def test_captions_are_ordered_by_the_weighted_sum_of_their_signs(deviations) -> None:
    suspicion = combine(deviations)
    whole = deviations @ np.array([WEIGHTS[sign] for sign in MEASURED_SIGNS])
    assert ((suspicion >= 0) & (suspicion <= 1)).all()
    order = np.argsort(whole)
    assert (np.diff(suspicion[order]) >= -1e-12).all()


def test_a_sign_that_is_not_there_counts_for_nothing() -> None:
    rows = np.random.default_rng(0).normal(size=(50, len(MEASURED_SIGNS)))
    rows[3, 1] = 0.0
    without = rows.copy()
    without[3, 1] = np.nan
    np.testing.assert_array_equal(combine(rows), combine(without))
    z = deviations_of(np.array([1.0, 2.0, 3.0, np.nan, 100.0]))
    assert np.isnan(z[3])
    assert z[4] > 20


def test_signs_that_agree_outweigh_a_single_one() -> None:
    rows = np.random.default_rng(1).normal(size=(500, len(MEASURED_SIGNS)))
    rows[0], rows[1] = 0.0, 2.5
    rows[0, SIGNS.index("other-image")] = 4.0
    suspicion = combine(rows)
    assert suspicion[1] > 0.5 > suspicion[0]


@pytest.mark.parametrize("name", ["scan-t2i", "rvse-mlp"])
def test_effects_of_a_batch_are_those_of_explain(name, concepts) -> None:
    model = cf.create(name, concepts, embed_size=16, text={"word_dim": 8})
    split = concepts.test.select(range(6))
    found = measure_effects(model, split, range(len(split.texts)))
    assert found.method == "combined"
    for number, text in enumerate(split.texts):
        image = split.fragments.read(int(split.image_of[number]))
        for method, field in (("combined", "effect"), ("leave-one-out", "fall")):
            match = explain(model, image, text, method=method)
            expected = [each for each in match.words if not each.is_punctuation]
            own = found.words[number]
            assert [(each.word, each.span) for each in own] == [
                (each.word, each.span) for each in expected
            ]
            effects = [getattr(each, field) for each in own]
            np.testing.assert_allclose(effects, [each.effect for each in expected], atol=1e-5)
    assert any(caption_words(text) for text in split.texts)


@pytest.mark.parametrize(
    ("name", "lacking", "used"),
    [
        ("rvse-mlp", False, "combined"),
        ("rvse-mlp", True, "leave-one-out"),
        ("uniter-small", False, "leave-one-out"),
    ],
)
def test_words_are_named_without_gradients_where_they_say_little(
    name, lacking, used, concepts, monkeypatch
) -> None:
    model = cf.create(name, concepts)
    if lacking:
        monkeypatch.setattr(type(model.text_encoder), "word_table", None)
    assert naming_method(model) == used


def test_many_errors_hardly_move_what_is_usual() -> None:
    rng = np.random.default_rng(0)
    calm, wild = rng.normal(size=600), rng.normal(6, 2, size=400)
    clean, noisy = Scale.of_usual(calm), Scale.of_usual(np.concatenate([calm, wild]))
    assert noisy.median == pytest.approx(clean.median, abs=0.35)
    assert noisy.spread == pytest.approx(1.0, abs=0.35)
    # the plain median and its deviation are moved far
    assert Scale.of(np.concatenate([calm, wild])).spread > 2
    assert Scale.of_usual(np.full(5, 0.3)).spread == 0.0
    assert Scale.of_usual(np.array([2.0])).median == 2.0
