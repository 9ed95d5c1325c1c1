"""The forgetting report: numbers of plain loops, paired intervals, and models that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.core.errors import DataError
from counterfoil.data.pairs import Split
from counterfoil.evaluation.evaluate import evaluate
from counterfoil.evaluation.foils.metrics import judge_foils
from counterfoil.evaluation.foils.sets import rule_set
from counterfoil.evaluation.forgetting import (
    ForgettingReport,
    PerImage,
    compare_with_start,
    measure,
)
from counterfoil.evaluation.zero_shot import ClassSet
from tests.conftest import make_split
from tests.objectives.live import small_model
from tests.training.trained_runs import score_as_trained


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("forgetting"), "test", 24, seed=0)


@pytest.fixture(scope="module")
def models(split):
    one = small_model(split, "vse-fc")
    torch.manual_seed(7)
    other = small_model(split, "vse-fc")
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return one, other


def classes(split: Split) -> ClassSet:
    names = ("dog", "kite", "boat")
    labels = tuple(
        frozenset(k for k, name in enumerate(names) if any(name in text for text in texts))
        for texts in split.captions
    )
    return ClassSet("three", names, labels, ("a {}.", "the {}."))


def test_the_numbers_are_those_of_the_other_evaluations(split, models) -> None:
    report = compare_with_start(*models, split, foils=["rules"], classes=[classes(split)])
    for side, model in zip(("before", "after"), models, strict=True):
        result = {change.name: getattr(change, side) for change in report.changes}
        foils = judge_foils(model, split, rule_set(split, seed=1))
        assert result["true > foil (rules)"] == pytest.approx(foils.accuracy)
        retrieval = evaluate(model, split, bootstrap=0, identical_captions="negatives")
        for name, direction in (("image → text", retrieval.i2t), ("text → image", retrieval.t2i)):
            assert result[name] == pytest.approx(sum(direction.recalls.values()))
        right = []
        for image, own in enumerate(classes(split).labels):
            if not own:
                continue
            fragments = split.fragments.read(image)
            scores = [
                np.mean([float(score_as_trained(model, [fragments], [t.format(name)])) for t in
                         ("a {}.", "the {}.")])
                for name in classes(split).classes
            ]  # fmt: skip
            wrong = [s for k, s in enumerate(scores) if k not in own]
            right.append(max(scores[k] for k in own) > max(wrong, default=-np.inf))
        name = "classes by prompts (three)"
        assert result[name] == pytest.approx(100 * np.mean(right))
        assert next(c.items for c in report.changes if c.name == name) == len(right)


def test_a_model_against_itself_has_lost_nothing(split, models) -> None:
    report = compare_with_start(models[0], models[0], split, bootstrap=50)
    assert report.changes
    for change in report.changes:
        assert change.difference == 0
        assert change.interval == (0, 0)
    assert report.of_kind("retrieval")
    assert "RSUM +0.0" in report.sentence()


def test_the_interval_is_of_the_paired_difference() -> None:
    """Two numbers that vary together differ by a constant: the interval has no width."""
    from counterfoil.evaluation.forgetting import _change

    rng = np.random.default_rng(0)
    total, count = rng.random(50) * 100, np.ones(50)
    one = PerImage("x", "foils", total, count)
    two = PerImage("x", "foils", total - 3, count)
    draws = rng.integers(50, size=(400, 50))
    change = _change(one, two, draws)
    assert change.interval == pytest.approx((-3, -3))
    low, high = change.before_interval
    assert low < total.mean() < high
    spread = 1.96 * total.std() / 50**0.5
    assert (high - low) / 2 == pytest.approx(spread, rel=0.3)


def test_images_without_items_do_not_break_a_resample() -> None:
    one = PerImage("x", "classes", np.array([100.0, 0.0]), np.array([1.0, 0.0]))
    values = one.resampled(np.array([[0, 0], [1, 1]]))
    assert values[0] == 100
    assert np.isnan(values[1])


def test_a_report_survives_json_and_says_everything(split, models) -> None:
    report = compare_with_start(
        *models, split, names=("a", "b"), bootstrap=20, classes=[classes(split)]
    )
    assert ForgettingReport.from_json(report.to_json()) == report
    text = report.to_markdown()
    for word in ("b against its start a", "true > foil", "image → text", "classes by prompts"):
        assert word in text
    numbers = report.numbers()
    assert numbers.keys() == {"i2t_change", "t2i_change", "foil_change", "class_change"}
    total = numbers["i2t_change"] + numbers["t2i_change"]
    assert f"RSUM {total:+.1f}" in report.sentence()
    assert report.chart().axes


def test_without_foils_the_report_says_nothing_of_them(split, models) -> None:
    captions = [["zzz qqq"] for _ in split.ids]  # no rule exchanges these words
    wordless = Split("test", split.ids, captions, fragments=split.fragments)
    report = compare_with_start(*models, wordless, classes=[], bootstrap=0)
    assert not report.of_kind("foils")
    assert report.sentence().startswith("RSUM ")
    assert "foil" not in report.sentence()
    assert "foil_change" not in report.numbers()
    assert "rules: no caption has a foil; rules:word-swap: no caption has" in report.footnote()
    (axes,) = report.chart().axes
    assert not axes.containers  # no point at 0 %


def test_a_file_of_foils_for_other_captions_is_an_error(split, models, tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    path.write_text('{"image": "elsewhere", "caption": "a dog", "foil": "a cat"}\n')
    with pytest.raises(DataError, match=r"foils\.jsonl"):
        compare_with_start(*models, split, foils=[str(path)], classes=[], bootstrap=0)


def test_the_footnote_says_what_retrieval_is_of(split, models) -> None:
    note = compare_with_start(*models, split, foils=["rules"], classes=[], bootstrap=0).footnote()
    assert "among these 24 images at once, with identical captions of other images as neg" in note


def test_the_same_seed_gives_the_same_intervals(split, models) -> None:
    one, two = (compare_with_start(*models, split, bootstrap=30) for _ in range(2))
    assert one == two
    without = {change.name for change in one.changes if change.kind != "classes"}
    assert measure(models[0], split).keys() == without
