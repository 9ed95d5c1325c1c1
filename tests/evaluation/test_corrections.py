"""The precision of corrections, and the rule that is chosen by it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.evaluation import corrections
from counterfoil.evaluation.corrections import (
    CorrectionCase,
    choose_rule,
    is_right,
    make_cases,
    measure_corrections,
)
from counterfoil.models.correct import Change, ReadCaption
from counterfoil.models.correction_rule import CorrectionRule, Proposal
from counterfoil.training.run_data import read_data
from tests.conftest import make_split
from tests.objectives.test_tags import small


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("corrections"), "train", 24, seed=0)


def change(place: int, new: str) -> Change:
    return Change(place, "", new, 0.0)


def foil_of(split, caption: int, place: int, new: str) -> CorrectionCase:
    parts = split.texts[caption].split()
    parts[place] = new
    return CorrectionCase(caption, " ".join(parts))


def test_a_change_is_right_if_it_restores_the_exchanged_word_or_names_the_same_thing(split) -> None:
    split = replace(split, captions=[["a dog near the tree"]] * len(split))
    case = foil_of(split, 0, 1, "zebra")
    assert is_right(split, case, change(1, "dog"))
    assert is_right(split, case, change(1, "puppy"))
    assert not is_right(split, case, change(1, "horse"))
    assert not is_right(split, case, change(2, "dog"))


def test_every_change_of_a_caption_that_was_right_is_wrong(split) -> None:
    case = CorrectionCase(0, split.texts[0])
    assert case.exchanged(split) == {}
    assert not is_right(split, case, change(1, split.texts[0].split()[1]))


def test_on_the_scenes_their_truth_decides(tmp_path) -> None:
    settings = {"source": "scenes", "options": {"images": [30, 4, 4]}, "min_count": 1}
    split = read_data(build_config({"data": settings}), tmp_path, Silent()).train
    exchanged, _ = make_cases(split, None, 0)
    restored = 0
    for case in exchanged:
        for place, true in case.exchanged(split).items():
            assert is_right(split, case, change(place, true))
            assert not is_right(split, case, change(place, "nonsense"))
            restored += 1
    assert restored > 50


def reading(wrong: float, gains: tuple[float, ...], words: tuple[str, ...]) -> ReadCaption:
    return ReadCaption("", 0.0, (), (Proposal(1, "zebra", wrong, words, gains),))


def chosen_for(monkeypatch, split, read) -> CorrectionRule:
    monkeypatch.setattr(corrections, "_read_captions", lambda *_: iter(read))
    return choose_rule(None, split)


def test_the_rule_is_the_one_that_is_worth_most_on_dev(split, monkeypatch) -> None:
    """Right changes have large gains, wrong ones small: the margin lies between them."""
    split = replace(split, captions=[["a dog near the tree"]] * len(split))
    good, true = foil_of(split, 0, 1, "zebra"), CorrectionCase(0, split.texts[0])
    read = [(good, reading(0.9, (2.0 + i / 100,), ("dog",))) for i in range(10)]
    read += [(true, reading(0.9, (1.0 + i / 100,), ("dog",))) for i in range(10)]
    rule = chosen_for(monkeypatch, split, read)
    assert rule.usable
    assert 1.0 < rule.margin < 2.1
    assert rule.precision == 1.0
    assert rule.made is not None
    assert rule.made >= 9


def test_no_rule_is_usable_if_changes_are_wrong_as_often_as_right(split, monkeypatch) -> None:
    split = replace(split, captions=[["a dog near the tree"]] * len(split))
    good, true = foil_of(split, 0, 1, "zebra"), CorrectionCase(0, split.texts[0])
    read = [(t, reading(0.9, (1.0,), ("dog",))) for t in (good, true) for _ in range(10)]
    rule = chosen_for(monkeypatch, split, read)
    assert not rule.usable
    assert not rule.allows(100.0)


@pytest.mark.slow
def test_a_report_counts_changes_and_how_often_none_is_made(split) -> None:
    model = small(split)
    report = measure_corrections(model, split, CorrectionRule(0.0, 0.0), captions=20)
    assert report.exchanged == report.untouched == 20
    assert report.changes >= report.changed > 0
    assert report.right <= report.changes
    assert report.as_dict()["none_made"] == 1 - report.changed / report.exchanged
    nothing = measure_corrections(model, split, CorrectionRule(usable=False), captions=20)
    assert nothing.changes == nothing.untouched_changes == 0
    assert nothing.as_dict()["precision"] is None
    assert nothing.rows()[1][2] == "100.0 %"


def test_a_gain_that_is_not_finite_does_not_stop_the_choice(split, monkeypatch) -> None:
    split = replace(split, captions=[["a dog near the tree"]] * len(split))
    good = foil_of(split, 0, 1, "zebra")
    read = [(good, reading(0.9, (2.0 + i / 100,), ("dog",))) for i in range(10)]
    read += [(good, reading(0.9, (gain,), ("dog",))) for gain in (float("inf"), float("nan"))]
    assert chosen_for(monkeypatch, split, read).usable


def test_a_report_of_unreadable_images_is_json_without_nan(split, monkeypatch) -> None:
    monkeypatch.setattr(corrections, "readable_images", lambda *_: {})
    report = measure_corrections(small(split), split, CorrectionRule(), captions=5)
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["precision"] is values["overall_precision"] is values["none_made"] is None
    assert report.rows()[1][2] == "–"
