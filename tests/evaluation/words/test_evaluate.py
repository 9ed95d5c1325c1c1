"""Words that rules exchanged in the captions of real photos."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import DataError
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import words
from counterfoil.evaluation.foils.sets import rule_set
from counterfoil.evaluation.words.cases import ARTICLES, rule_cases
from counterfoil.foils.rules import KINDS

CAPTIONS = [
    ["A dog runs on the grass.", "Two dogs play with a red ball."],
    ["A man in a blue shirt stands behind an orange car .", "Three children on a bench"],
]
SPLIT = Split("test", ["a", "b"], CAPTIONS)


def spoken(text: str) -> list[str]:
    return [word for word in words(text) if any(letter.isalnum() for letter in word)]


@given(st.integers(0, 50), st.sampled_from(KINDS))
def test_the_words_that_differ_are_those_that_are_wrong(seed: int, kind: str) -> None:
    try:
        made = rule_cases(SPLIT, kinds=[kind], per_caption=2, seed=seed)
    except DataError:
        return
    for case in made.cases:
        true, false = spoken(case.caption), spoken(case.foil)
        assert len(case.wrong) == len(false) == len(true)
        for old, new, wrong in zip(true, false, case.wrong, strict=True):
            article = old in ARTICLES and new in ARTICLES
            assert (wrong == kind) == (old != new and not article)
        assert case.caption in CAPTIONS[case.image]
        assert case.labels.any()


def test_the_foils_are_those_that_accuracy_is_measured_on() -> None:
    made = rule_cases(SPLIT, seed=1)
    plain = rule_set(SPLIT, seed=1)
    assert [case.foil for case in made.cases] == [pair.foil for pair in plain.pairs]
    assert (made.captions, made.left_out) == (plain.captions, plain.left_out)


def test_captions_that_no_rule_touches_are_refused() -> None:
    split = Split("test", ["a"], [["Hm ."]])
    with pytest.raises(DataError, match="no rule"):
        rule_cases(split)
