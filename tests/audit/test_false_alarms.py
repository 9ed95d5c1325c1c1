"""Conformal thresholds: the share of right items above them is what was asked for."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.audit import FalseAlarms, alarm_curve, audit_split, calibrate
from counterfoil.audit.false_alarms import MIN_TRUSTED, conformal_threshold, word_pool
from counterfoil.audit.suspicion import (
    MEASURED_SIGNS,
    WEIGHTS,
    Scale,
    Scales,
    caption_doubts,
    sign_deviations,
    sign_scales,
)
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.evaluation.words.doubts import NO_DOUBT


@given(st.integers(20, 200), st.floats(0.05, 0.5), st.integers(0, 100))
def test_a_new_value_exceeds_the_threshold_with_the_given_chance(count, rate, seed) -> None:
    """Exact, by counting: of n + 1 exchangeable values, each one is the new one equally often."""
    values = np.random.default_rng(seed).permutation(count + 1).astype(float)
    above = [
        values[new] > conformal_threshold(np.delete(values, new), rate) for new in range(count + 1)
    ]
    assert rate - 1 / (count + 1) - 1e-9 <= np.mean(above) <= rate + 1e-9


def test_too_few_values_for_a_rate_list_nothing() -> None:
    assert conformal_threshold(np.arange(10.0), 0.05) == math.inf
    assert conformal_threshold(np.arange(19.0), 0.05) == 18.0


def test_equal_values_are_no_alarms() -> None:
    assert not (np.ones(100) > conformal_threshold(np.ones(100), 0.1)).any()


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 2.0])
def test_a_rate_that_is_no_share_is_refused(rate) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        conformal_threshold(np.arange(100.0), rate)


def test_words_that_are_never_wrong_do_not_count() -> None:
    doubts = {0: np.array([NO_DOUBT, 1.0]), 1: np.array([2.0, NO_DOUBT]), 2: np.array([9.0])}
    assert word_pool(doubts, [0, 1]).tolist() == [1.0, 2.0]
    assert word_pool(doubts, []).tolist() == []


@pytest.mark.slow
def test_an_audit_lists_the_asked_share_of_right_captions(learned, concepts) -> None:
    trusted = audit_split(learned, concepts.train)
    limits = calibrate(trusted, 0.1)
    assert limits.captions == int((~np.isnan(trusted.suspicion)).sum()) >= MIN_TRUSTED
    listed = audit_split(learned, concepts.train, false_alarms=limits)
    share = listed.listed / limits.captions
    assert 0.1 - 0.03 < share <= 0.1 + 1e-9
    assert listed.summary.suspicious == listed.listed
    words = word_pool(listed.word_doubts, listed.reference)
    assert 0.05 < (words > listed.word_threshold).mean() <= 0.1 + 1e-9
    assert any("10 % false alarms" in note for note in listed.summary.notes)
    curve = alarm_curve(trusted, trusted, (0.05, 0.2))
    assert [one.nominal for one in curve] == [0.05, 0.2]
    assert curve[0].captions <= 0.05 < curve[1].captions <= 0.2


def usual_in(values) -> Scales:
    """The scales that an audit of these values uses without trusted captions."""
    signs = sign_scales(values)
    doubts = caption_doubts(sign_deviations(values, signs))
    return Scales(signs, Scale.of_usual(doubts), dict(WEIGHTS))


@pytest.mark.parametrize("wrong", [0, 150, 400])
def test_neither_chance_nor_errors_move_the_share_of_right_captions_listed(wrong) -> None:
    """Values of right captions have one distribution, those of wrong ones lie above it."""
    rng = np.random.default_rng(0)
    by_trusted, by_own = [], []
    for _ in range(30):
        trusted, audited = rng.gamma(4.0, size=(2, 1000, len(MEASURED_SIGNS)))
        audited[:wrong] += 6.0
        usual = usual_in(trusted)
        limit = conformal_threshold(usual.suspicion(trusted), 0.1)
        by_trusted.append((usual.suspicion(audited)[wrong:] > limit).mean())
        by_own.append((usual_in(audited).suspicion(audited)[wrong:] > limit).mean())
    # both the threshold and the share are estimated, the latter from 600 captions at least
    chance = math.sqrt(0.1 * 0.9 * (1 / 1000 + 1 / (1000 - wrong)))
    assert np.mean(by_trusted) == pytest.approx(0.1, abs=3 * chance / math.sqrt(30))
    assert np.std(by_trusted) < 1.5 * chance
    # compared with what is usual among themselves, it does move: that is why they are not
    off = np.abs(np.array([by_trusted, by_own]) - 0.1).mean(1)
    assert off[1] > 1.5 * off[0]


def test_trusted_captions_say_what_is_usual_in_the_audited_split(learned, concepts) -> None:
    trusted = audit_split(learned, concepts.train)
    limits = calibrate(trusted, 0.1)
    other = concepts.test
    alone, audited = audit_split(learned, other), audit_split(learned, other, false_alarms=limits)
    assert audited.scales == trusted.scales != alone.scales
    above = int((audited.suspicion > limits.caption_threshold).sum())
    assert audited.listed == audited.summary.suspicious == above
    captions = audited.survey.captions
    np.testing.assert_array_equal(audited.values, alone.values)
    np.testing.assert_array_equal(
        audited.suspicion[captions], trusted.scales.suspicion(audited.values[captions])
    )
    assert limits.as_dict()["scales"]["doubt"]["median"] == trusted.scales.doubt.median
    alarm_curve(trusted, audited, [0.1])
    with pytest.raises(DataError, match="not compared with what is usual in 'train'"):
        alarm_curve(trusted, alone, [0.1])


def stored_and_read(limits, **changed) -> FalseAlarms:
    """Thresholds as they stand in a summary.json, with a part of the scales changed."""
    tree = json.loads(json.dumps(limits.as_dict()))
    scales = {**tree["scales"], **changed}
    signs = {sign: Scale(**scale) for sign, scale in scales["signs"].items()}
    read = Scales(signs, Scale(**scales["doubt"]), scales["weights"])
    return FalseAlarms(**{**tree, "scales": read})


def test_stored_scales_hold_for_the_weights_that_they_were_measured_with(learned, concepts) -> None:
    limits = calibrate(audit_split(learned, concepts.train), 0.1)
    assert limits.as_dict()["scales"]["weights"] == WEIGHTS
    now = audit_split(learned, concepts.test, false_alarms=limits)
    again = audit_split(learned, concepts.test, false_alarms=stored_and_read(limits))
    np.testing.assert_array_equal(again.suspicion, now.suspicion)


def test_stored_thresholds_are_read_again_or_refused(learned, concepts) -> None:
    limits = calibrate(audit_split(learned, concepts.train), 0.1)
    tree = json.loads(json.dumps(limits.as_dict()))
    assert FalseAlarms.from_dict(tree) == limits
    for change, message in (
        ({"rate": "often"}, "stored false alarms: rate: Input should be a valid number"),
        ({"scales": 3}, "stored false alarms: scales: .* expected what"),
        ({"scales": {**tree["scales"], "weights": None}}, "no weights are stored"),
        ({"scales": {**tree["scales"], "weights": {"low-score": 1.0}}}, "weights low-score 1; exp"),
    ):
        with pytest.raises(DataError, match=message):
            FalseAlarms.from_dict({**tree, **change})
    with pytest.raises(DataError, match="top level: Input should be a dictionary"):
        FalseAlarms.from_dict([])


def test_suspicion_by_scales_of_other_weights_is_refused() -> None:
    usual = usual_in(np.random.default_rng(0).normal(size=(200, len(MEASURED_SIGNS))))
    before = Scales(usual.signs, usual.doubt, {**WEIGHTS, "neighbors": 0.75})
    with pytest.raises(DataError, match=r"neighbors 0\.75"):
        before.suspicion(np.zeros((3, len(MEASURED_SIGNS))))


def test_scales_from_before_a_sign_existed_are_refused(learned, concepts) -> None:
    limits = calibrate(audit_split(learned, concepts.train), 0.1)
    fewer = {sign: each for sign, each in WEIGHTS.items() if sign != "neighbor-sum"}
    signs = {sign: limits.as_dict()["scales"]["signs"][sign] for sign in fewer}
    before = stored_and_read(limits, signs=signs, weights=fewer)
    with pytest.raises(DataError, match=r"wrong-words 0\.5; expected .*neighbor-sum 0\.5; .*again"):
        audit_split(learned, concepts.test, false_alarms=before)
    # the first files had no weights at all
    with pytest.raises(DataError, match=r"no weights are stored .*earlier version.*audit_split"):
        audit_split(learned, concepts.test, false_alarms=stored_and_read(limits, weights=None))


def test_scales_measured_with_other_weights_are_refused(learned, concepts) -> None:
    limits = calibrate(audit_split(learned, concepts.train), 0.1)
    other = stored_and_read(limits, weights={**WEIGHTS, "neighbors": 0.75})
    with pytest.raises(DataError, match=r"neighbors 0\.75.*expected .*neighbors 0\.6"):
        audit_split(learned, concepts.test, false_alarms=other)


def test_a_sign_that_had_no_value_needs_no_scale(learned, concepts) -> None:
    """Its weight says that it was measured."""
    limits = calibrate(audit_split(learned, concepts.train), 0.1)
    signs = limits.as_dict()["scales"]["signs"]
    without = {sign: each for sign, each in signs.items() if sign != "neighbor-sum"}
    audit = audit_split(learned, concepts.test, false_alarms=stored_and_read(limits, signs=without))
    assert np.isfinite(audit.suspicion[audit.survey.captions]).all()
    assert "neighbor-sum" not in audit.scales.signs


def test_a_few_trusted_captions_are_refused(learned, concepts) -> None:
    few = audit_split(learned, concepts.test.select([0, 1]))
    with pytest.raises(DataError, match="too few for 5 % false alarms"):
        calibrate(few, 0.05)


def test_a_trusted_split_of_another_size_is_named_with_what_follows(learned, concepts) -> None:
    limits = calibrate(audit_split(learned, concepts.train), 0.1)
    summary = audit_split(learned, concepts.test, false_alarms=limits).summary
    assert set(limits.notes(32, True)) <= set(summary.notes)
    (too_many,) = (note for note in summary.notes if "alike in size" in note)
    assert "'train' has more images (96 and 32)" in too_many
    assert "probably below 10 %" in too_many
    assert "has fewer images (96 and 144)" in limits.notes(144, True)[1]
    assert "probably above 10 %" in limits.notes(144, True)[1]
    assert not any("alike" in note for size in (70, 140) for note in limits.notes(size, True))


@pytest.mark.slow
def test_words_are_judged_like_those_that_the_threshold_was_measured_on(
    learned, concepts, monkeypatch
) -> None:
    few, many = concepts.train.select(range(60)), concepts.train
    smallest = len(many.texts) * 7 // 10
    assert len(few.texts) < smallest
    monkeypatch.setattr("counterfoil.evaluation.words.doubts.MIN_LANGUAGE_CAPTIONS", smallest)
    small, large = audit_split(learned, few), audit_split(learned, many)
    assert (small.surprise, large.surprise) == (False, True)
    limits = calibrate(small, 0.1)
    audited = audit_split(learned, many, false_alarms=limits)
    assert not limits.surprise
    assert not audited.surprise
    assert any("judged without one" in note for note in audited.summary.notes)
    # the doubts are smaller: all but the surprise of each word, which is never negative
    with_surprise = word_pool(large.word_doubts, large.reference)
    assert word_pool(audited.word_doubts, audited.reference).mean() < with_surprise.mean()
    reverse = audit_split(learned, few, false_alarms=calibrate(large, 0.1))
    assert any("fewer wrong words are named" in note for note in reverse.summary.notes)
    for one, other in [(small, large), (large, small)]:
        with pytest.raises(DataError, match="alike in size"):
            alarm_curve(one, other, [0.1])
