"""Examples of negatives and corrections (TAGS-DC, figures 1 and 3), and sources of foils by row."""

from __future__ import annotations

import copy
from xml.etree import ElementTree

import pytest

from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.evaluation.foils.metrics import judge_foils, verdicts_on
from counterfoil.evaluation.foils.sets import FoilChoice, FoilPair, FoilSet, foils_of_model
from counterfoil.evaluation.foils.truth import caption_positions, makes_sense, truth_of
from counterfoil.models.correct import correct
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.reproduce import examples
from counterfoil.reproduce.catalogue import load_artifact
from counterfoil.reproduce.examples import choose
from counterfoil.reproduce.measure import MeasureEvaluator, RunEvaluator, retrieved_set
from counterfoil.reproduce.plots import charts_of
from counterfoil.reproduce.present import write_reproduction
from counterfoil.reproduce.results import Reproduction, SeedResult, table_rows
from counterfoil.reproduce.spec import Examples, build_artifact
from counterfoil.reproduce.store import skip_known
from counterfoil.scoring.encode import score_split
from counterfoil.training.run_folder import load_model
from tests.reproduce.conftest import TINY, planned, tiny
from tests.reproduce.test_columns import SMALL
from tests.reproduce.test_reproduce import finish, shown

FOILS = {"masks": 2, "samples": 2, "captions": 20}
NEGATIVES = [
    {"label": ["batch"], "run": "plain", "foils": "hardest-of-batch"},
    {"label": ["split"], "run": "plain", "foils": "hardest-of-split"},
    {"label": ["written"], "run": "plain", "foils": "writer",
     "published_measures": {"f30k": [40.0]}},
]  # fmt: skip
CORRECTIONS = [
    {"label": ["plain"], "run": "plain", "foils": "writer"},
    {"label": ["writer"], "run": "writer"},
]
TRUTH = [
    {
        "label": ["writer"],
        "run": "writer",
        "published_measures": {"f30k": [96.5, None, None, None]},
    },
    {"label": ["blind"], "run": "writer", "blind": True},
    {"label": ["rules"], "run": "writer", "foils": "rules"},
]
SHARES = ("true_negatives", "senseless", "false_negatives", "undecided")


def sheet(show: str, rows, number: str = "harder", **change):
    base = copy.deepcopy(TINY["base"])
    del base["common"]["model"]["text"]
    runs = {
        "plain": {"common": {"objective": "triplet"}},
        "writer": {"common": {"model": SMALL, "train": {"batch_size": 8, "epochs": 1}}},
    }
    measures = [{"title": "number", "foils": "own", "number": number}]
    given = {
        "kind": "examples", "show": show, "examples": 3, "rows": rows, "measures": measures,
        "metrics": [], "foils": FOILS, "base": base, "runs": runs,
    }  # fmt: skip
    return tiny(**(given | change))


def truth():
    measures = [{"title": name, "foils": "own", "number": name} for name in SHARES]
    tree = sheet("negatives", TRUTH, measures=measures)
    return {k: v for k, v in tree.items() if k not in ("show", "examples")} | {"kind": "table"}


@pytest.fixture(scope="module")
def negatives(out, cache):
    plan = planned(sheet("negatives", NEGATIVES), out)
    return plan, finish(plan, cache)


@pytest.fixture(scope="module")
def corrections(out, cache):
    plan = planned(sheet("corrections", CORRECTIONS, "accuracy"), out)
    return plan, finish(plan, cache)


def test_negatives_of_every_source_stand_beside_their_caption(negatives, tmp_path) -> None:
    _, result = negatives
    for example in result.sheet.examples:
        assert [line.kind for line in example.lines] == ["caption", "batch", "split", "written"]
        caption, batch, hardest, _ = example.lines
        assert hardest.scores["plain"] >= batch.scores["plain"]
        assert caption.scores.keys() == {"plain"}
        assert not any(word.new for word in caption.words)
        assert any(word.new for word in example.lines[-1].words)
    page = write_reproduction(result, tmp_path)
    assert "3 captions of test, drawn at random (seed 1)" in page
    assert page.count("| caption |") == 3
    assert "**Bold**: in none of the image's captions." in page
    assert "(40.0)" in page
    assert "![A tiny table](scores.svg)" in page
    scores, _ = charts_of(result)
    (axes,) = scores.draw().axes
    assert sum(len(group.get_offsets()) for group in axes.collections) == 20 * 3
    assert Reproduction.from_json((tmp_path / "tiny.json").read_text()) == result


@pytest.mark.slow
def test_the_pictures_of_examples_are_in_their_svg(negatives, tmp_path) -> None:
    _, result = negatives
    write_reproduction(result, tmp_path)
    svg = ElementTree.parse(tmp_path / "examples.svg")  # noqa: S314 - our own
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}image"))) == 3
    assert (tmp_path / "examples.png").read_bytes().startswith(b"\x89PNG")


def test_examples_are_of_different_images_and_chosen_by_the_seed_alone(negatives, cache) -> None:
    plan, result = negatives
    assert len({one.image for one in result.sheet.examples}) == 3
    split = RunEvaluator(plan.out / "evaluations", cache, Silent()).split_of(plan.runs["plain"][0])
    every = FoilSet.of("x", [FoilPair(c, "y") for c in range(len(split.texts))], len(split.texts))
    some = FoilSet.of("x", [FoilPair(c, "y") for c in (2, 3, 20)], 3)
    assert choose(split, [every], 4, 1) == choose(split, [every], 4, 1)
    assert choose(split, [every], 4, 1) != choose(split, [every], 4, 2)
    chosen = choose(split, [every, some], 9, 1)
    assert 20 in chosen
    assert len(chosen) == 2  # 2 and 3 are captions of one image


def test_a_sheet_is_made_once(negatives, cache, monkeypatch) -> None:
    plan, result = negatives
    monkeypatch.setattr(examples, "load_model", None)
    assert shown(plan, cache).sheet == result.sheet


def test_a_foil_is_shown_with_its_suspected_words_and_its_correction(corrections, tmp_path) -> None:
    _, result = corrections
    for example in result.sheet.examples:
        positive, synthetic, corrected = example.lines
        kinds = [line.kind for line in example.lines]
        assert kinds == ["positive", "synthetic", "corrected"]
        assert all(line.scores.keys() == {"plain", "writer"} for line in example.lines)
        assert all(0 <= word.wrong <= 1 for word in synthetic.words)
        assert any(word.new for word in synthetic.words)
        assert corrected.scores["writer"] >= synthetic.scores["writer"] - 1e-5
        assert positive.words[0].wrong is None
    page = write_reproduction(result, tmp_path)
    assert "| corrected |" in page
    assert "the probability that the word is wrong" in page
    page_axes, *_ = charts_of(result)[-1].draw().axes
    marked = [text for text in page_axes.texts if text.get_bbox_patch() is not None]
    words = [word for one in result.sheet.examples for line in one.lines for word in line.words]
    assert len(marked) == sum(word.wrong is not None for word in words) > 0


def test_examples_are_corrected_although_the_run_found_its_corrections_unusable(
    corrections, cache, tmp_path, monkeypatch
) -> None:
    plan, _ = corrections
    results = []

    def corrected(model, *given, **options):
        model.correction_rule = CorrectionRule(threshold=0.9, margin=3.0, usable=False)
        results.append(correct(model, *given, **options))
        return results[-1]

    monkeypatch.setattr(examples, "correct", corrected)
    judge = MeasureEvaluator(RunEvaluator(tmp_path, cache, Silent()), plan.artifact.foils)
    sheet = examples.collect_sheet(plan, table_rows(plan), judge)
    assert len(results) == len(sheet.examples)
    assert {(r.rule.usable, r.rule.threshold, r.rule.margin) for r in results} == {(True, 0.5, 0.0)}


def test_examples_wait_until_all_their_runs_are_finished(tmp_path, cache) -> None:
    plan = planned(sheet("negatives", NEGATIVES), tmp_path)
    assert [run.name for run in plan.in_order()] == ["plain", "writer"]
    result = shown(plan, cache)
    assert result.sheet is None
    assert "not finished" in write_reproduction(result, tmp_path / "page")


@pytest.mark.slow
def test_generators_are_judged_by_the_truth_of_the_scenes(out, cache, tmp_path) -> None:
    plan = planned(truth(), out)
    result = finish(plan, cache)
    run = plan.runs["writer"][0]
    split = RunEvaluator(out / "evaluations", cache, Silent()).split_of(run)
    model = load_model(run.folder, "cpu")
    for row, blind in zip(result.rows[:2], (False, True), strict=True):
        foils = foils_of_model(model, "w", split, FoilChoice(**FOILS, blind=blind))
        verdicts = verdicts_on(split, foils.pairs)
        false, true = verdicts.count("false"), verdicts.count("true")
        numbers = row.each[0].numbers
        assert numbers["true_negatives"] == pytest.approx(100 * false / (false + true))
        assert numbers["true_negatives"] + numbers["false_negatives"] == pytest.approx(100)
        assert numbers["senseless"] <= numbers["true_negatives"]
        assert numbers["undecided"] == pytest.approx(
            100 * verdicts.count("unsure") / len(foils.pairs)
        )
    assert result.rows[2].each[0].numbers != result.rows[0].each[0].numbers
    page = write_reproduction(result, tmp_path)
    assert "(96.5)" in page


def test_a_blind_writer_does_not_see_the_image(out, cache) -> None:
    run = planned(truth(), out).runs["writer"][0]
    finish(planned(truth(), out), cache)
    split = RunEvaluator(out / "evaluations", cache, Silent()).split_of(run)
    model = load_model(run.folder, "cpu")
    other = split.select([*range(1, len(split)), 0])
    # the same captions with the images of their neighbours
    moved = type(split)(split.name, split.ids, split.captions, None, other.fragments, split.extras)
    choice = FoilChoice(**FOILS, blind=True)
    assert (
        foils_of_model(model, "w", split, choice).pairs
        == foils_of_model(model, "w", moved, choice).pairs
    )


def test_rows_of_one_run_with_other_foils_are_other_results(tmp_path) -> None:
    recipes = [row.result.recipe for row in table_rows(planned(truth(), tmp_path))]
    assert len(set(recipes)) == 3


def test_a_sentence_that_makes_no_sense_is_told_from_one_that_is_false(out, cache) -> None:
    run = planned(truth(), out).runs["writer"][0]
    split = RunEvaluator(out / "evaluations", cache, Silent()).split_of(run)
    nouns = ("dog", "car", "cat", "ball", "boat", "man", "bird")
    place, noun = next(
        (index, word)
        for index, text in enumerate(split.texts)
        for word in text.lower().replace(".", "").split()
        if word in nouns
    )
    _, caption = truth_of(split, *caption_positions(split, [place])[0])
    text = split.texts[place].lower()
    other = next(one for one in nouns if one != noun)
    assert makes_sense(caption, text)
    assert makes_sense(caption, text.replace(noun, other, 1))
    assert makes_sense(caption, text.replace(noun, "zebra", 1))  # which no scene has
    assert not makes_sense(caption, text.replace(noun, "red", 1))
    pairs = [FoilPair(place, text.replace(noun, "red", 1))]
    report = judge_foils(load_model(run.folder, "cpu"), split, FoilSet.of("x", pairs, 1))
    assert (report.true_negatives, report.senseless, report.false_negatives) == (100, 100, 0)


def test_retrieved_negatives_are_the_captions_of_others_that_score_highest(out, cache) -> None:
    run = planned(sheet("negatives", NEGATIVES), out).runs["plain"][0]
    split = RunEvaluator(out / "evaluations", cache, Silent()).split_of(run)
    model = load_model(run.folder, "cpu")
    scores = score_split(model, split).scores
    result = retrieved_set(model, split, FoilChoice(captions=15), False, Silent())
    assert len(result.pairs) == 15
    for pair in result.pairs:
        image = int(split.image_of[pair.caption])
        own = split.captions[image]
        best = max(
            (float(scores[image, t]), text) for t, text in enumerate(split.texts) if text not in own
        )
        assert pair.foil not in own
        score = max(float(scores[image, t]) for t, x in enumerate(split.texts) if x == pair.foil)
        assert score == pytest.approx(best[0], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"show": "nothing"}, "show"),
        ({"examples": 0}, "mine.yaml: examples: "),
        ({"rows": [{"label": ["a"], "ensemble": ["plain", "writer"]}]}, "need one run each"),
        (
            {"rows": [{"label": ["a"], "published_only": True, "foils": "rules",
                       "published_measures": {"f30k": [1.0]}}]},
            "foils and blind are only for rows of one run",
        ),
        ({"rows": [{"label": ["a"], "run": "plain", "foils": "wirter"}]}, "'writer'"),
    ],
)  # fmt: skip
def test_a_mistake_in_examples_is_named(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(sheet("negatives", NEGATIVES) | change, "mine.yaml")


def test_the_writer_of_foils_is_trained_for_a_new_row_although_its_own_row_is_known(
    tmp_path,
) -> None:
    tree = sheet("corrections", CORRECTIONS, "accuracy")
    tree = {k: v for k, v in tree.items() if k not in ("show", "examples")} | {"kind": "table"}
    plan = planned(tree, tmp_path)
    plain, writer = (each.result.recipe for each in table_rows(plan))
    one = SeedResult(seed=0, recipe=writer, numbers={"rsum": 1.0})
    skip_known(plan, {writer: {0: one}})
    assert {run.name for run in plan.missing()} == {"plain", "writer"}
    skip_known(plan, {writer: {0: one}, plain: {0: one}})
    assert plan.missing() == []


def test_the_figures_1_and_3_and_the_truth_of_tags_quote_what_the_paper_prints() -> None:
    first, third, judged = map(load_artifact, ("tags.figure1", "tags.figure3", "tags.truth"))
    assert isinstance(first, Examples)
    assert isinstance(third, Examples)
    assert (first.show, third.show) == ("negatives", "corrections")
    assert third.rows[-1].published_measures["f30k"] == [None, 66.5, 87.3]
    assert judged.rows[0].published_measures["f30k"][0] == 96.5
    assert {"tags", "uniter-mlm"} <= set(judged.used)
    assert [row.blind for row in judged.rows].count(True) == 1
