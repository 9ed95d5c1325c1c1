"""Precision and recall of an audit, on numbers small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from counterfoil.audit import audit_split
from counterfoil.audit.planted_errors import Corrupted, measure_audit
from counterfoil.audit.suspicion import CaptionWord, WordEffects


@pytest.fixture(scope="module")
def audit(learned, concepts):
    """An audit of four captions, whose verdicts are then replaced by made-up ones."""
    found = audit_split(learned, concepts.test.select([0, 1]))
    return replace(
        found,
        suspicion=np.array([0.9, 0.8, 0.2, 0.6]),
        signs=np.array([[0.9, 0, 0], [0, 0.8, 0], [0, 0, 0.2], [0, 0, 0.6]]),
        word_doubts={
            0: np.array([0.0, 5.0]),
            1: np.array([0.0, 3.0]),
            2: np.array([4.0, -1.0]),
            3: np.array([0.0, 2.0]),
        },
        word_effects=WordEffects(
            {
                number: [CaptionWord("x", (0, 1), effect, effect) for effect in (-0.1, 0.3)]
                for number in range(4)
            },
            "parts",
        ),
        word_threshold=1.0,
    )


@pytest.fixture(scope="module")
def truth(audit):
    swapped = np.array([True, False, False, False])
    return Corrupted(audit.split, swapped, {2: ("object", ""), 3: ("", "count")})


def test_captions_are_counted(audit, truth) -> None:
    found = measure_audit(audit, truth, ("low-score",))
    assert (found.captions.wrong, found.captions.items, found.captions.listed) == (3, 4, 3)
    assert found.captions.precision == pytest.approx(200 / 3)
    assert found.captions.recall == pytest.approx(200 / 3)
    assert found.captions.ap == pytest.approx(100 * (1 + 2 / 3 + 3 / 4) / 3)
    assert found.captions.chance == 75
    assert (found.swapped.items, found.swapped.precision, found.swapped.auc) == (2, 50, 100)
    assert (found.exchanged.items, found.exchanged.recall, found.exchanged.auc) == (3, 50, 0)
    assert found.signs["low-score"].recall == pytest.approx(100 / 3)


def test_a_word_counts_as_listed_only_where_its_caption_is(audit, truth) -> None:
    found = measure_audit(audit, truth)
    assert (found.words.wrong, found.words.items, found.words.listed) == (2, 4, 1)
    assert (found.words.precision, found.words.recall, found.words.ap) == (100, 50, 100)
    # by effects alone, the first word of either caption is doubted
    assert (found.plain.listed, found.plain.precision, found.plain.auc) == (1, 0, 50)
    assert (found.everywhere.items, found.everywhere.listed) == (6, 2)
    assert found.everywhere.precision == 50


def test_what_could_not_be_read_is_left_out(audit, truth) -> None:
    unread = replace(audit, suspicion=np.array([np.nan, 0.8, 0.2, 0.6]))
    found = measure_audit(unread, truth)
    assert (found.captions.items, found.captions.wrong) == (3, 2)
    assert found.swapped is None
