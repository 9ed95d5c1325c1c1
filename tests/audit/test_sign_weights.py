"""Weights of signs learned from checked captions: near the default ones, unless labels disagree."""

from __future__ import annotations

import numpy as np
import pytest

from counterfoil.audit import audit_split, calibrate, false_alarms
from counterfoil.audit.neighbors import (
    Side,
    copy_disagreement,
    disagreement,
    summed_disagreement,
)
from counterfoil.audit.planted_errors import corrupt
from counterfoil.audit.sign_weights import (
    MIN_OF_EACH,
    WEIGHED_SIGNS,
    learn_weights,
)
from counterfoil.audit.suspicion import MEASURED_SIGNS, WEIGHTS, combine
from counterfoil.core.errors import ConfigError
from counterfoil.evaluation.words.evaluate import roc_auc
from tests.audit.conftest import with_unreadable

DEFAULT = {sign: WEIGHTS.get(sign, 0.0) for sign in WEIGHED_SIGNS}


def noisy(informative: str, count: int = 1000, seed: int = 0):
    """Deviations of captions, a fifth of them wrong, whose errors only one sign knows."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(count) < 0.2
    deviations = rng.normal(size=(count, len(WEIGHED_SIGNS)))
    deviations[wrong, WEIGHED_SIGNS.index(informative)] += 3.0
    return deviations, wrong


def first(count: int, of: int = 1000) -> np.ndarray:
    return np.arange(of) < count


@pytest.mark.parametrize("sign", ["low-score", "copies", "wrong-words"])
def test_a_sign_that_tells_errors_gets_weight(sign) -> None:
    deviations, wrong = noisy(sign)
    learned = learn_weights(deviations, wrong, first(300))
    assert learned.learned
    assert (learned.right, learned.wrong) == ((~wrong[:300]).sum(), wrong[:300].sum())
    assert learned.weights[sign] > DEFAULT[sign]
    before = combine(deviations[:, : len(MEASURED_SIGNS)])
    after = learned.suspicion(deviations)
    assert roc_auc(after[300:], wrong[300:]) > roc_auc(before[300:], wrong[300:]) + 0.03
    assert "300 checked captions" in learned.note()


def test_more_labels_move_the_weights_farther_from_their_defaults() -> None:
    deviations, wrong = noisy("copies")
    moved = [
        sum(
            abs(learn_weights(deviations, wrong, first(n)).weights[s] - DEFAULT[s]) for s in DEFAULT
        )
        for n in (60, 300, 1000)
    ]
    assert 0 < moved[0] < moved[1] < moved[2]


@pytest.mark.parametrize(("right", "bad"), [(0, 40), (40, 0), (MIN_OF_EACH - 1, 40), (0, 0)])
def test_few_labels_or_one_kind_of_them_keep_the_default_weights(right, bad) -> None:
    deviations, _ = noisy("copies")
    wrong, checked = first(bad), first(bad + right)
    kept = learn_weights(deviations, wrong, checked)
    assert not kept.learned
    assert kept.weights == DEFAULT
    np.testing.assert_allclose(
        kept.suspicion(deviations), combine(deviations[:, : len(MEASURED_SIGNS)])
    )
    assert "too few" in kept.note()


def test_labels_of_captions_that_were_not_checked_are_not_read() -> None:
    deviations, wrong = noisy("copies")
    checked = first(200)
    other = np.where(checked, wrong, ~wrong)
    assert learn_weights(deviations, wrong, checked) == learn_weights(deviations, other, checked)


def test_labels_that_are_reversed_are_pointed_out() -> None:
    deviations, wrong = noisy("other-caption")
    right_way = learn_weights(deviations, wrong, first(300))
    reversed_labels = learn_weights(deviations, ~wrong, first(300))
    assert right_way.agreement == pytest.approx(1 - reversed_labels.agreement)
    assert right_way.agreement > 0.8
    assert "reversed" not in right_way.note()
    assert "are the labels reversed?" in reversed_labels.note()
    unrelated = np.random.default_rng(1)
    few = [
        learn_weights(deviations, unrelated.random(1000) < 0.5, first(20)).note() for _ in range(50)
    ]
    assert sum("reversed" in note for note in few) <= 2


def test_separable_and_missing_values_give_finite_weights() -> None:
    deviations, wrong = noisy("copies")
    deviations[wrong, WEIGHED_SIGNS.index("copies")] += 500.0
    deviations[::7, 0] = np.nan
    deviations[:, 3] = np.nan
    learned = learn_weights(deviations, wrong, first(500))
    assert np.isfinite(list(learned.weights.values())).all()
    assert learned.weights["neighbors"] == pytest.approx(DEFAULT["neighbors"])
    suspicion = learned.suspicion(deviations)
    assert ((suspicion >= 0) & (suspicion <= 1)).all()
    assert roc_auc(suspicion[500:], wrong[500:]) > 0.99


def test_signs_of_neighbors_are_their_formulas() -> None:
    near = np.array([[0.0, 0.3, np.nan]])
    gap = np.array([[0.8, 0.5, np.nan]])
    side = Side(near, gap, near, np.array([[1, 2, -1]]))
    reliable = np.array([0.0, 0.5, 1.0])
    parts = np.array([0.5 * 1.0, 1.0 * np.exp(-3.0)])
    total = parts @ [0.8, 0.5]
    assert summed_disagreement(side, reliable)[0] == pytest.approx(total / 3)
    assert disagreement(side, reliable)[0] == pytest.approx(total / parts.sum())
    assert copy_disagreement(side, reliable)[0] == pytest.approx(0.5 * 0.8)
    alone = Side(*[np.full((1, 2), np.nan)] * 3, np.full((1, 2), -1))
    assert np.isnan(summed_disagreement(alone, reliable)).all()
    assert np.isnan(copy_disagreement(alone, reliable)).all()


@pytest.fixture(scope="module")
def truth(concepts):
    return corrupt(concepts.test, 0.2, 0.0, seed=1)


def test_an_audit_learns_from_checked_captions(learned, truth) -> None:
    checked = dict(enumerate(map(bool, truth.labels)))
    half = {number: wrong for number, wrong in checked.items() if number % 2}
    audit = audit_split(learned, truth.split, checked=half)
    assert audit.weights is not None
    assert audit.weights.learned
    assert audit.weights.right + audit.weights.wrong == len(half)
    assert audit.weights.note() in audit.summary.notes
    default = audit_split(learned, truth.split)
    assert default.weights is None
    rest = np.arange(len(truth.labels)) % 2 == 0
    gained = roc_auc(audit.suspicion[rest], truth.labels[rest])
    assert gained > roc_auc(default.suspicion[rest], truth.labels[rest]) - 0.02
    np.testing.assert_array_equal(audit.values, default.values)
    again = audit_split(learned, truth.split, checked=half)
    np.testing.assert_array_equal(again.suspicion, audit.suspicion)


def test_too_few_checked_captions_leave_the_audit_as_it_was(learned, truth, monkeypatch) -> None:
    audit = audit_split(learned, truth.split, checked={0: True, 1: False})
    default = audit_split(learned, truth.split)
    np.testing.assert_array_equal(audit.suspicion, default.suspicion)
    assert any("too few to learn" in note for note in audit.summary.notes)
    assert audit_split(learned, truth.split, checked={}).weights is None
    # so a rate of false alarms can be measured on it as on the default audit
    monkeypatch.setattr(false_alarms, "MIN_TRUSTED", 50)
    assert calibrate(audit, 0.2) == calibrate(default, 0.2)


def test_checked_captions_of_unreadable_images_are_counted(learned, truth, tmp_path) -> None:
    split = with_unreadable(truth.split, [1, 3], tmp_path)
    checked = {int(number): bool(truth.labels[number]) for number in range(40)}
    lost = int(np.isin(split.image_of[:40], [1, 3]).sum())
    assert lost > 0
    audit = audit_split(learned, split, checked=checked)
    assert audit.weights is not None
    assert audit.weights.right + audit.weights.wrong == 40 - lost
    assert f"{lost} checked captions could not be scored; they were not used" in audit.summary.notes


@pytest.mark.parametrize(
    ("checked", "message"),
    [
        ({-1: True}, "numbered from 0"),
        ({10**6: True}, "numbered from 0"),
        ({0: float("nan")}, "expected True"),
        ({0: "wrong"}, "expected True"),
    ],
)
def test_impossible_labels_are_refused(checked, message, learned, truth) -> None:
    with pytest.raises(ConfigError, match=message):
        audit_split(learned, truth.split, checked=checked)


def test_a_rate_of_false_alarms_needs_the_default_weights(learned, truth) -> None:
    checked = dict(enumerate(map(bool, truth.labels)))
    audit = audit_split(learned, truth.split, checked=checked)
    with pytest.raises(ConfigError, match="audit it without them"):
        calibrate(audit, 0.2)
