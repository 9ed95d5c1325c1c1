"""Word-level truth: the metrics, the foils, and what a model's word effects find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.scenes import load_scenes, tokens
from counterfoil.data.text.tokenizers import known_text
from counterfoil.evaluation.evaluate import evaluate
from counterfoil.evaluation.report import Comparison, RunResult, WordReport
from counterfoil.evaluation.words.cases import KINDS, FoilCase, make_foils
from counterfoil.evaluation.words.doubts import may_be_wrong
from counterfoil.evaluation.words.effects import (
    WordScores,
    average_words,
    measure_words,
    sign_accuracy,
)
from counterfoil.evaluation.words.evaluate import (
    Ranking,
    average_precision,
    choose_word_method,
    evaluate_words,
    report_words,
    roc_auc,
)
from counterfoil.features import with_fragments
from counterfoil.models import create_model
from counterfoil.models.match import POINTS, Yardstick

LABELED = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    cache = tmp_path_factory.mktemp("scenes")
    return with_fragments(load_scenes(cache, (20, 4, 16), workers=1), cache, workers=1)


def make(name: str, pairs, seed: int = 0, **matcher):
    torch.manual_seed(seed)
    section = {"name": name, "embed_size": 64, "text": {"word_dim": 8}, "matcher": matcher}
    config = build_config({"model": section, "data": {"min_count": 1}})
    return create_model(config.model, pairs.train, config.data)


def naive_auc(scores, labels) -> float:
    items = list(zip(scores, labels, strict=True))
    pairs = [(p, n) for p, wrong in items if wrong for n, also in items if not also]
    right = [1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs]
    return float(np.mean(right)) if right else float("nan")


def naive_ap(scores, labels) -> float:
    precisions = []
    for score, label in zip(scores, labels, strict=True):
        if label:
            kept = [a for s, a in zip(scores, labels, strict=True) if s >= score]
            precisions.append(sum(kept) / len(kept))
    return float(np.mean(precisions)) if precisions else float("nan")


@given(LABELED)
def test_auc_and_ap_agree_with_counting_every_pair(items) -> None:
    scores, labels = zip(*items, strict=True)
    assert roc_auc(scores, labels) == pytest.approx(naive_auc(scores, labels), nan_ok=True)
    assert average_precision(scores, labels) == pytest.approx(naive_ap(scores, labels), nan_ok=True)


@given(LABELED)
def test_auc_and_ap_agree_with_scikit_learn(items) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = zip(*items, strict=True)
    if len(set(labels)) == 2:
        assert roc_auc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores))
        expected = metrics.average_precision_score(labels, scores)
        assert average_precision(scores, labels) == pytest.approx(expected)


@given(LABELED, st.randoms())
def test_order_of_items_and_growing_scores_change_nothing(items, random) -> None:
    scores, labels = zip(*items, strict=True)
    shuffled = random.sample(items, len(items))
    again, marks = zip(*((np.exp(score) + 5, label) for score, label in shuffled), strict=True)
    for metric in (roc_auc, average_precision):
        assert metric(again, marks) == pytest.approx(metric(scores, labels), nan_ok=True)
    flipped = roc_auc([-score for score in scores], labels)
    assert flipped == pytest.approx(1 - roc_auc(scores, labels), nan_ok=True)


@given(LABELED, st.data())
def test_a_weight_is_a_repetition(items, data) -> None:
    times = data.draw(st.lists(st.integers(0, 3), min_size=len(items), max_size=len(items)))
    repeated = [item for item, n in zip(items, times, strict=True) for _ in range(n)]
    scores, labels = (np.array(x) for x in zip(*items, strict=True))
    ranking = Ranking(scores, labels)
    stacked = ranking.auc([times, np.ones(len(items))])
    assert stacked[1] == pytest.approx(float(ranking.auc()), nan_ok=True)
    more, marks = ([i[0] for i in repeated], [i[1] for i in repeated])
    assert stacked[0] == pytest.approx(roc_auc(more, marks), nan_ok=True)
    weighted = ranking.average_precision(times)
    assert float(weighted) == pytest.approx(average_precision(more, marks), nan_ok=True)


def test_extremes_of_auc_and_ap() -> None:
    labels = [True, False, True, False, False]
    assert roc_auc([9, 1, 8, 2, 3], labels) == average_precision([9, 1, 8, 2, 3], labels) == 1.0
    assert roc_auc([0, 0, 0, 0, 0], labels) == 0.5
    assert average_precision([0, 0, 0, 0, 0], labels) == 0.4
    assert np.isnan(roc_auc([1, 2], [True, True]))
    assert np.isnan(average_precision([1, 2], [False, False]))
    with pytest.raises(DataError, match="finite"):
        roc_auc([1.0, float("nan")], [True, False])


def test_foils_differ_from_their_caption_in_the_words_they_name(scenes) -> None:
    made = make_foils(scenes.test)
    assert made.captions == len(scenes.test.texts)
    assert len(made.cases) + made.left_out == made.captions
    for case in made.cases:
        true, false = tokens(case.caption), tokens(case.foil)
        changed = [a != b for a, b in zip(true, false, strict=True)]
        assert changed == case.labels.tolist()
        assert 1 <= sum(changed) <= 3
        assert case.kinds <= set(KINDS)
        assert case.caption in scenes.test.captions[case.image]


def test_foils_are_the_same_every_time_and_for_any_choice_of_captions(scenes) -> None:
    made = make_foils(scenes.test)
    assert make_foils(scenes.test) == made
    assert make_foils(scenes.test, seed=1) != made
    few = make_foils(scenes.test, max_captions=20)
    assert few.captions == 20
    assert set(few.cases) <= set(made.cases)
    more = make_foils(scenes.test, per_caption=3)
    assert set(made.cases) <= set(more.cases)
    assert len({(c.caption, c.foil, c.image) for c in more.cases}) > 2 * len(made.cases)


def test_a_split_without_truth_is_refused(concepts) -> None:
    with pytest.raises(DataError, match=r"split 'test' does not say what is true.*scenes"):
        make_foils(concepts.test)


def test_a_number_of_foils_below_one_is_refused(scenes) -> None:
    with pytest.raises(ConfigError, match="at least 1 per caption"):
        make_foils(scenes.test, per_caption=0)


def oracle(made, effects, true=1.0, false=0.0) -> WordScores:
    count = len(made.cases)
    scores = np.full(count, true), np.full(count, false)
    return WordScores(made.cases, *scores, effects, "parts", [])


def test_an_oracle_finds_every_wrong_word(scenes) -> None:
    made = make_foils(scenes.test)
    known = oracle(made, [np.where(case.labels, -1.0, 0.5) for case in made.cases])
    report = report_words(known, made, "test", bootstrap=50)
    for found in (report.word_auc, report.word_ap, report.caption_auc, report.caption_ap):
        assert (found.value, found.interval) == (100.0, (100.0, 100.0))
    assert report.pair_accuracy.value == 100.0
    assert report.positives == sum(case.labels.sum() for case in made.cases)
    assert all(kind.word_auc.value == 100.0 for kind in report.kinds.values())
    against = report_words(oracle(made, [-e for e in known.effects]), made, "test", bootstrap=0)
    assert against.word_auc.value == 0.0


def test_effects_that_know_nothing_are_at_chance_and_ties_count_against(scenes) -> None:
    made = make_foils(scenes.test)
    rng = np.random.default_rng(0)
    blind = oracle(made, [rng.normal(size=len(case.wrong)) for case in made.cases], 0.5, 0.5)
    report = report_words(blind, made, "test", bootstrap=200)
    low, high = report.word_auc.interval
    assert low < report.word_auc.value < high
    assert abs(report.word_auc.value - 50) < 10
    assert abs(report.word_ap.value - report.ap_chance) < 10
    assert report.pair_accuracy.value == 0.0


def test_a_kind_is_judged_by_pairs_with_that_error_only(scenes) -> None:
    made = make_foils(scenes.test, per_caption=2)
    scores = oracle(made, [np.zeros(len(case.wrong)) for case in made.cases])
    fooled = np.array([case.kinds == {"object"} for case in made.cases])
    scores = replace(scores, false=np.where(fooled, 2.0, 0.0))
    report = report_words(scores, made, "test", bootstrap=20)
    assert report.kinds["object"].pair_accuracy.value == 0.0
    assert report.kinds["object"].pairs == fooled.sum()
    assert report.kinds["attribute"].pair_accuracy.value == 100.0
    assert report.pair_accuracy.value == pytest.approx(100 * (1 - fooled.mean()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("naaf", {}),
        pytest.param("scan-t2i", {}, marks=pytest.mark.slow),
        ("scan-t2i", {"aggregation": "mean"}),
        pytest.param("gsmn-sparse", {}, marks=pytest.mark.slow),
        pytest.param("sgraf", {}, marks=pytest.mark.slow),
        ("vse-fc", {}),
    ],
    ids=str,
)
def test_effects_of_many_captions_are_those_of_each_explained_by_itself(
    name, options, scenes
) -> None:
    model = make(name, scenes, **options)
    # What is measured reads an unknown word as <unk>; an explanation leaves it out.
    cases = [
        case
        for case in make_foils(scenes.test, max_captions=80).cases
        if not known_text(model.text, case.foil).unknown
        and not known_text(model.text, case.caption).unknown
    ][:12]
    assert len(cases) > 5
    found = measure_words(model, scenes.test, cases)
    for number, case in enumerate(found.cases):
        fragments = scenes.test.fragments.read(case.image)
        match = model.explain(fragments, case.foil)
        assert found.method == match.method
        effects = [word.effect for word in match.words if word.word.isalpha()]
        assert found.effects[number].tolist() == pytest.approx(effects, abs=1e-5)
        assert found.false[number] == pytest.approx(match.score, abs=1e-5)
        true = float(model.score([fragments], [case.caption]))
        assert found.true[number] == pytest.approx(true, abs=1e-5)


def test_an_evaluation_is_the_same_every_time_and_round_trips(scenes) -> None:
    model = make("naaf", scenes).train()
    report = evaluate_words(model, scenes.test, bootstrap=30)
    assert model.training
    assert evaluate_words(model, scenes.test, bootstrap=30) == report
    assert WordReport.from_json(report.to_json()) == report
    assert report.as_dict()["method"] == "parts"
    assert report.to_markdown().count("\n|") == len(report.rows()) + 1
    assert len({len(row) for row in report.rows()}) == 1


def test_an_ensemble_averages_scores_and_effects(scenes) -> None:
    cases = make_foils(scenes.test, max_captions=10).cases
    one, two = (measure_words(make("naaf", scenes, seed), scenes.test, cases) for seed in (0, 1))
    both = average_words([one, two])
    assert both.true == pytest.approx((one.true + two.true) / 2)
    assert both.effects[3] == pytest.approx((one.effects[3] + two.effects[3]) / 2)
    same = average_words([one, one])
    assert same.effects[0] == pytest.approx(one.effects[0])
    with pytest.raises(ConfigError, match="no model"):
        evaluate_words([], scenes.test)


def test_a_comparison_has_a_row_per_run(scenes) -> None:
    model = make("naaf", scenes)
    words = evaluate_words(model, scenes.test, bootstrap=0, max_captions=20)
    found = evaluate(model, scenes.test, bootstrap=0)
    runs = [RunResult(run=f"run-{i}", model="naaf", retrieval=found, words=words) for i in "ab"]
    table = Comparison(split="test", runs=tuple(runs))
    header, *rows = table.rows()
    assert [row[0] for row in rows] == ["run-a", "run-b"]
    assert {"RSUM", "i2t R@1", "t2i R@1", "word AUC", "word AP", "true > false"} <= set(header)
    assert "| run-a | naaf |" in table.to_markdown()
    bare = tuple(run.model_copy(update={"words": None}) for run in runs)
    plain = Comparison(split="test", runs=bare)
    assert "word AUC" not in plain.rows()[0]
    assert Comparison.from_json(table.to_json()).to_json() == table.to_json()


@pytest.mark.slow
def test_the_chosen_method_has_the_right_sign_most_often(scenes, monkeypatch) -> None:
    monkeypatch.setattr("counterfoil.evaluation.words.evaluate.CHOICE_CAPTIONS", 40)
    model = make("naaf", scenes, 0)
    made = make_foils(scenes.test, 1, 40, 0)
    accuracy = {}
    for method in ("parts", "leave-one-out", "mask", "gradient", "combined"):
        scores = measure_words(model, scenes.test, made.cases, method=method)
        hits: dict[bool, list[bool]] = {True: [], False: []}
        for case, effects in zip(scores.cases, scores.effects, strict=True):
            classes = may_be_wrong(case.foil)
            for wrong, counts, effect in zip(case.labels, classes, effects, strict=True):
                if wrong or counts:
                    hits[bool(wrong)].append((effect < 0) == wrong)
        accuracy[method] = sum(sum(each) / len(each) for each in hits.values())
        assert scores.method == method
    assert choose_word_method(model, scenes.test) == max(accuracy, key=accuracy.get)


def test_signs_count_not_the_order_of_effects() -> None:
    """A method that ranks the wrong word first, but has all effects below 0, is no explanation."""
    case = FoilCase(0, "a dog runs", "a cat runs", ("", "object", ""))
    signed = [np.array([0.1, -0.2, 0.3])]
    ranked = [np.array([-0.1, -9.0, -0.2])]
    for effects, expected in ((signed, 1.0), (ranked, 0.5)):
        assert sign_accuracy([case], effects) == expected
    assert np.isnan(sign_accuracy([case], [np.full(3, np.nan)]))


def test_captions_that_no_rule_knows_choose_no_method(concepts) -> None:
    unknown = replace(concepts.test, captions=[["xyz"]] * len(concepts.test.captions))
    assert choose_word_method(make("naaf", concepts), unknown) is None


def test_effects_that_are_no_numbers_choose_no_method(scenes) -> None:
    model = make("naaf", scenes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert choose_word_method(model, scenes.test) is None


@pytest.mark.slow
def test_words_are_measured_as_they_are_explained(scenes) -> None:
    model = make("naaf", scenes)
    assert evaluate_words(model, scenes.test, bootstrap=0).method == "parts"
    ramp = tuple(np.linspace(0.0, 1.0, POINTS).tolist())
    model.yardstick = Yardstick("dev", 9, ramp, ramp, 0.1, 0.1, word_method="leave-one-out")
    assert evaluate_words(model, scenes.test, bootstrap=0).method == "leave-one-out"
    assert evaluate_words(model, scenes.test, bootstrap=0, method="parts").method == "parts"
