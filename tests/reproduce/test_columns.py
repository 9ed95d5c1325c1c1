"""Columns besides recalls: what is refused, who writes the foils, and numbers of real runs."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.cli.signals import StopSignals
from counterfoil.core.config import load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.evaluation.foils.metrics import judge_foils
from counterfoil.evaluation.foils.report import FoilReport
from counterfoil.evaluation.foils.sets import FoilChoice, foils_by, foils_of_model
from counterfoil.evaluation.forgetting import Change, ForgettingReport
from counterfoil.evaluation.report import Measured, WordReport
from counterfoil.evaluation.words.evaluate import evaluate_words
from counterfoil.reproduce.catalogue import load_artifact, names
from counterfoil.reproduce.collect import collect
from counterfoil.reproduce.columns import (
    FOIL_NUMBERS,
    FORGETTING_NUMBERS,
    WORD_NUMBERS,
    FoilOptions,
    MeasureColumn,
)
from counterfoil.reproduce.measure import MeasureEvaluator, RunEvaluator, _forgotten
from counterfoil.reproduce.measure_parallel import Task, measure_together, tasks
from counterfoil.reproduce.plan import Settings, make_plan
from counterfoil.reproduce.present import to_markdown
from counterfoil.reproduce.results import Reproduction
from counterfoil.reproduce.runner import Outcome
from counterfoil.reproduce.spec import build_artifact
from counterfoil.training.run_data import read_data
from counterfoil.training.run_folder import load_model
from tests.reproduce.conftest import TINY, planned, tiny
from tests.reproduce.test_reproduce import finish, shown

SMALL = {
    "name": "uniter-small",
    "embed_size": 16,
    "image": {"dropout": 0.0},
    "matcher": {"layers": 1, "heads": 2, "extras": ["mlm", "discrimination", "correction"]},
}
FOILS = {"masks": 2, "samples": 2, "captions": 20}
COLUMNS = [
    {"title": "by the next", "foils": "writer@+1", "number": "accuracy"},
    {"title": "by itself", "foils": "own", "number": "true_negatives"},
    {"title": "rules", "foils": "rules", "number": "wod_auc", "decimals": 2},
    {"title": "fluent", "foils": "rules", "number": "perplexity_foils"},
    {"title": "words", "number": "pair_accuracy"},
]


def table(**change):
    """A dual encoder and a cross-encoder, of which the second can write foils."""
    runs = {
        "plain": {"common": {"objective": "triplet"}},
        "writer": {"common": {"model": SMALL, "train": {"batch_size": 8, "epochs": 1}}},
    }
    rows = [
        {"label": ["plain"], "run": "plain", "published_measures": {"f30k": [2.3, None, 50, 1, 2]}},
        {"label": ["writer"], "run": "writer"},
    ]
    given = {"runs": runs, "rows": rows, "measures": COLUMNS, "foils": FOILS, "metrics": ["rsum"]}
    base = copy.deepcopy(TINY["base"])
    del base["common"]["model"]["text"]
    given["base"] = base
    return tiny(**(given | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": ["rsun"]}, "unknown 'rsun'; did you mean 'rsum'"),
        ({"metrics": [], "measures": [], "rows": [{"label": ["a"], "run": "plain"}]}, "at least"),
        ({"measures": [COLUMNS[0], COLUMNS[0]]}, "the same title"),
        ({"measures": COLUMNS[:2]}, "5 published measures for 2 columns"),
        ({"measures": [{"title": "x", "foils": "rules", "number": "acuracy"}]}, "'accuracy'"),
        ({"measures": [{"title": "x", "number": "accuracy"}]}, "known: word_auc"),
        ({"measures": [*COLUMNS[:4], COLUMNS[0] | {"title": "x", "foils": "wirter"}]}, "'writer'"),
        ({"foils": {"maks": 2}}, "unknown key 'foils.maks'"),
        ({"trade_off": ["wrods"]}, "no measure 'wrods'; did you mean 'words'"),
    ],
)
def test_a_mistake_in_a_column_is_named(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(table(**change), "mine.yaml")


def test_named_rules_write_foils_without_a_run() -> None:
    column = MeasureColumn(title="x", foils="rules:word-swap", number="accuracy")
    assert column.writer is None
    assert MeasureColumn(title="x", foils="rulers", number="accuracy").writer == "rulers"


def test_what_a_run_forgot_is_read_from_its_folder(tmp_path) -> None:
    changes = [
        Change(name=name, kind=kind, before=50.0, after=after, items=9)
        for name, kind, after in (
            ("true > foil (rules)", "foils", 60.0),
            ("true > foil (rules:word-swap)", "foils", 54.0),
            ("image → text", "retrieval", 48.0),
            ("text → image", "retrieval", 53.0),
        )
    ]
    report = ForgettingReport(
        start="a", run="b", split="test", images=9, changes=changes, bootstrap=0
    )
    (tmp_path / "forgetting.json").write_text(report.to_json())
    numbers = _forgotten(tmp_path)
    assert numbers == {"i2t_change": -2.0, "t2i_change": 3.0, "foil_change": 7.0}
    assert set(numbers) < set(FORGETTING_NUMBERS)
    assert _forgotten(tmp_path / "from nothing") == {}


def is_number(kind: type[BaseModel], name: str) -> bool:
    return any(
        part in str(kind.model_fields[name].annotation) for part in ("float", Measured.__name__)
    )


def test_the_numbers_that_a_column_may_have_are_those_of_the_reports() -> None:
    assert all(is_number(FoilReport, name) for name in FOIL_NUMBERS)
    assert all(is_number(WordReport, name) for name in WORD_NUMBERS)


def test_who_writes_the_foils_is_trained_although_it_is_no_row(tmp_path) -> None:
    plan = planned(table(), tmp_path)
    assert [(run.name, run.config.seed) for run in plan.in_order()] == [
        ("plain", 0), ("writer", 0), ("writer", 1),
    ]  # fmt: skip


def test_single_keys_of_a_run_are_changed_in_every_layer(tmp_path) -> None:
    runs = {
        "plain": {"paper": {"objective": {"hardest": {"margin": 0.3}}}},
        "writer": {"like": "plain", "change": {"objective.hardest.margin": 0.1}},
        "third": {"like": "writer", "change": {"model.text.word_dim": 4}},
        "led": {"like": "plain", "change": {"model.init_from": "{run:writer}"}},
    }
    rows = [{"label": [name], "run": name} for name in runs]
    for data in ("scenes", "elsewhere"):
        plan = planned(tiny(runs=runs, rows=rows), tmp_path, data=data)
        third = plan.runs["third"][0].config
        assert third.objective == {"hardest": {"margin": 0.1}}
        assert third.model.text == {"word_dim": 4}
        assert plan.runs["led"][0].config.model.init_from == str(plan.runs["writer"][0].folder)
        assert plan.runs["led"][0].needs == (plan.runs["writer"][0],)
    changed = planned(tiny(runs=runs, rows=rows), tmp_path, overrides=("model.text.word_dim=6",))
    assert changed.runs["third"][0].config.model.text == {"word_dim": 6}


@pytest.fixture(scope="module")
def made(out, cache):
    plan = planned(table(), out)
    return plan, finish(plan, cache)


def test_columns_have_the_numbers_of_the_reports(made, cache) -> None:
    plan, results = made
    plain, writer = plan.runs["plain"][0], plan.runs["writer"][0]
    other = plan.runs["writer@+1"][0]
    split = read_data(writer.config, cache, Silent())["test"]
    choice = FoilChoice(**FOILS)
    models = {run.title: load_model(run.folder, "cpu") for run in (plain, writer, other)}
    foils = foils_of_model(models[other.title], "x", split, choice)
    for row, run in zip(results.rows, (plain, writer), strict=True):
        report = judge_foils(models[run.title], split, foils)
        assert row.numbers["by the next"].mean == pytest.approx(report.accuracy)
        words = evaluate_words(models[run.title], split, max_captions=20, bootstrap=0, seed=1)
        assert row.numbers["words"].mean == pytest.approx(words.pair_accuracy.value)
    rules = judge_foils(models[writer.title], split, foils_by("rules", split, choice, load_model))
    assert results.rows[1].numbers["rules"].mean == pytest.approx(rules.wod_auc)
    own = judge_foils(
        models[writer.title], split, foils_of_model(models[writer.title], "x", split, choice)
    )
    assert results.rows[1].numbers["by itself"].mean == pytest.approx(own.true_negatives)
    assert results.rows[1].numbers["fluent"].mean > 1


def test_what_a_model_cannot_do_is_left_empty(made) -> None:
    _, results = made
    plain = results.rows[0]
    assert plain.numbers.keys() & {column["title"] for column in COLUMNS} == {
        "by the next",
        "words",
    }
    assert not plain.errors


def test_columns_are_printed_with_what_was_published(made) -> None:
    _, results = made
    page = to_markdown(results)
    head = next(line for line in page.splitlines() if line.startswith("| Loss"))
    assert head == "| Loss | RSUM | by the next | by itself | rules | fluent | words |"
    plain, writer = (
        next(line for line in page.splitlines() if line.startswith(f"| {name}"))
        for name in ("plain", "writer")
    )
    number = results.rows[0].numbers["by the next"].mean
    assert f"| {number:.1f} (2.3) |  | (50.00) |" in plain
    assert f" {results.rows[1].numbers['rules'].mean:.2f} |" in writer
    assert Reproduction.from_json(results.to_json()) == results


def test_what_was_measured_is_not_measured_again(made, cache, monkeypatch) -> None:
    plan, results = made
    monkeypatch.setattr("counterfoil.reproduce.measure.judge_foils", None)
    monkeypatch.setattr("counterfoil.reproduce.measure.evaluate_words", None)
    again = shown(plan, cache)
    assert [row.numbers for row in again.rows] == [row.numbers for row in results.rows]


@pytest.mark.slow
def test_several_processes_measure_what_one_does(made, cache, tmp_path, monkeypatch) -> None:
    plan, results = made
    judge = RunEvaluator(tmp_path, cache, Silent())
    foil_judge = MeasureEvaluator(judge, plan.artifact.foils)
    waiting = tasks(plan, foil_judge)
    # what both are judged on by one writer is one task: it writes once
    shared = [task for task in waiting if len({run.digest for _, run, _ in task.columns}) > 1]
    assert len(shared) == 1
    assert {column.title for column, _, _ in shared[0].columns} == {"by the next"}
    assert measure_together(plan, judge, 2, Silent()) == len(waiting) > 1
    left = {column.title for task in tasks(plan, foil_judge) for column, _, _ in task.columns}
    assert left == {"by itself", "fluent"}  # of the run that writes nothing
    for name in ("judge_foils", "evaluate_words"):
        monkeypatch.setattr(f"counterfoil.reproduce.measure.{name}", None)
    again = collect(plan, Outcome(), judge)
    assert [row.numbers for row in again.rows] == [row.numbers for row in results.rows]
    assert not any(row.errors for row in again.rows)


@pytest.mark.slow
def test_ensembles_are_scored_by_the_processes(made, cache, tmp_path) -> None:
    plan, _ = made
    rows = [
        {"label": ["one"], "run": "plain"},
        {"label": ["two"], "ensemble": ["plain", "plain@+1"]},
        {"label": ["other"], "ensemble": ["plain@+1", "plain"]},
        {"label": ["alike"], "ensemble": ["plain", "plain@+1"], "standardize": True},
    ]
    both = planned(table(rows=rows, measures=[]), plan.out)
    finish(both, cache)
    judge = RunEvaluator(tmp_path, cache, Silent())
    assert measure_together(both, judge, 2, Silent(), columns=False) == 3
    members = tuple(both.runs[name][0] for name in ("plain", "plain@+1"))
    assert judge.report_path(members).is_file()
    assert judge.report_path(members, standardize=True).is_file()
    anew = RunEvaluator(tmp_path / "x", cache, Silent())
    assert judge.report(members) == anew.report(members)
    assert judge.report(members, standardize=True) == anew.report(members, standardize=True)
    assert measure_together(both, judge, 2, Silent()) == 0


def test_of_ensembles_only_the_agreement_with_people_is_measured(
    made, cache, tmp_path, monkeypatch
) -> None:
    plan, _ = made
    rows = [
        {"label": ["paper"], "published_only": True, "published": {"f30k": [1] * 6 + [6]}},
        {"label": ["both"], "ensemble": ["plain", "writer"], "standardize": True},
        {"label": ["one"], "run": "plain"},
    ]
    measures = [COLUMNS[4], {"title": "τ", "judgements": "a.txt", "number": "tau"}]
    both = planned(table(rows=rows, measures=measures), plan.out)
    judge = RunEvaluator(tmp_path, cache, Silent())
    seen = []

    def tau(_, name, runs, standardize=False) -> float:
        seen.append((name, len(runs), standardize))
        return 7.0 + len(runs)

    monkeypatch.setattr(MeasureEvaluator, "tau", tau)
    paper, ensemble, one = collect(both, Outcome({}), judge).rows
    assert seen == [("a.txt", 2, True), ("a.txt", 1, False)]
    assert not paper.each
    assert (ensemble.numbers["τ"].mean, one.numbers["τ"].mean) == (9.0, 8.0)
    assert "words" not in ensemble.numbers
    assert "words" in one.numbers


def test_nothing_is_measured_once_the_user_wants_to_stop(made, cache, tmp_path) -> None:
    plan, _ = made
    judge = RunEvaluator(tmp_path, cache, Silent())
    measure_together(plan, judge, 2, Silent(), should_stop=lambda: True)
    assert tasks(plan, MeasureEvaluator(judge, plan.artifact.foils))


@dataclass(frozen=True)
class Odd:
    """A column that cannot be measured in a moment, or kills who measures it."""

    folder: Path
    deadly: bool = False

    @property
    def is_cost(self) -> bool:
        (self.folder / "began").touch()
        if self.deadly:
            os._exit(3)
        time.sleep(4)
        (self.folder / "ended").touch()
        return True


@pytest.mark.parametrize("deadly", [False, True])
def test_what_is_under_way_is_not_waited_for_nor_is_the_dead(
    made, cache, tmp_path, monkeypatch, deadly
) -> None:
    plan, _ = made
    odd = [Task(columns=((Odd(tmp_path, deadly), None, None),))] * 3
    monkeypatch.setattr("counterfoil.reproduce.measure_parallel.tasks", lambda *_: odd)
    stop = (tmp_path / "began").exists
    assert measure_together(plan, RunEvaluator(tmp_path, cache, Silent()), 2, Silent(), stop) == 3
    assert stop()
    assert not (tmp_path / "ended").exists()


def test_the_command_stops_where_it_is_measuring(made, cache, tmp_path, monkeypatch) -> None:
    plan, _ = made
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(table(foils=FOILS | {"captions": 19})))
    monkeypatch.setattr(StopSignals, "__init__", lambda self: setattr(self, "stop_requested", True))
    monkeypatch.setattr("counterfoil.reproduce.collect.collect", None)  # would go on by itself
    words = [file, "--out", plan.out, "--cache", cache, "--seeds", 1, "--jobs", 2]
    result = CliRunner().invoke(app, ["reproduce", *map(str, words)])
    assert result.exit_code == 130, result.exception


def test_runs_on_other_captions_do_not_write_for_each_other(made, cache, tmp_path) -> None:
    plan, _ = made
    runs = table()["runs"] | {
        "few": {"like": "writer", "common": {"data": {"options": {"images": [24, 8, 6]}}}}
    }
    few = planned(table(runs=runs, rows=[{"label": ["few"], "run": "few"}], measures=[]), tmp_path)
    judge = MeasureEvaluator(RunEvaluator(tmp_path, cache, Silent()), FoilOptions(**FOILS))
    column = MeasureColumn(title="x", foils="writer", number="accuracy")
    run = few.runs["few"][0]
    writer = plan.runs["writer"][0]
    run.folder.parent.mkdir(parents=True)
    run.folder.symlink_to(writer.folder)
    with pytest.raises(ConfigError, match="other captions"):
        judge.number(column, run, writer)


SHARING = [name for name in names() if name.startswith("tags.") and name != "tags.others"]


@pytest.mark.parametrize("name", SHARING)
def test_the_tables_of_tags_share_their_runs(name, tmp_path) -> None:
    known = {
        run.digest
        for table_ in ("tags.table2", "tags.scenes")
        for run in make_plan(load_artifact(table_), Settings(seeds=1), tmp_path).in_order()
    }
    plan = make_plan(load_artifact(name), Settings(seeds=1), tmp_path)
    assert {run.digest for run in plan.in_order()} <= known


def test_tags_differ_by_what_the_paper_varies(tmp_path) -> None:
    for data, published in (("scenes", None), ("f30k", "f30k"), ("coco", "coco-5k")):
        plan = make_plan(load_artifact("tags.table2"), Settings(data, published, seeds=1), tmp_path)
        tags = plan.runs["tags"][0].config.objective["tags"]
        assert plan.runs["tags-word"][0].config.objective["tags"] == tags | {"unit": "word"}
        static = plan.runs["tags-static"][0]
        generator = next(one for one in static.needs if one.name.startswith("uniter-"))
        changed = {"generator": str(generator.folder), "mlm": 0.05}  # not used: the default
        assert static.config.objective["tags"] == tags | changed
        dc = plan.runs["tags-dc"][0]
        if data == "scenes":
            assert generator.name == "uniter-pretrain"
            starts = {run[0].config.model.init_from for run in plan.runs.values()}
            assert starts == {str(generator.folder)}
            assert len({run[0].config.train.epochs for run in plan.runs.values()}) == 1
        else:
            assert generator.config.objective["tags"]["rank"] == 0
            assert dc.config.model.init_from == str(plan.runs["tags"][0].folder)
        both = dc.config.objective["tags-dc"]
        assert plan.runs["tags-wod"][0].config.objective["tags-dc"] == both | {"correction": 0.0}


@pytest.mark.parametrize(
    ("run", "small", "large"),
    [
        ("uniter-pretrain", "scenes/uniter-pretrain", None),
        ("uniter", "scenes/uniter-small", None),
        ("tags", "scenes/tags", "tags-base"),
        ("tags-dc", "scenes/tags-dc-one-stage", "tags-dc-base"),
        ("tags-large", None, "tags-large"),
        ("tags-dc-large", None, "tags-dc-large"),
    ],
)
def test_the_runs_of_tags_have_the_settings_of_their_recipes(run, small, large, tmp_path) -> None:
    def settings(config):
        tree = config.model_dump(exclude={"seed", "evaluation"})
        tree["model"].pop("init_from", None)
        tree["data"].pop("source")
        return tree

    cases = [("scenes", None, small)] if small else []
    if large:
        cases += [("x", "f30k", f"f30k/{large}"), ("x", "coco-5k", f"coco/{large}")]
    table_ = load_artifact("tags.table1" if "large" in run else "tags.table2")
    for data, published, name in cases:
        plan = make_plan(table_, Settings(data, published, seeds=1), tmp_path)
        ours = next(one for one in plan.in_order() if one.name == run)
        recipe = load_config(name)
        assert settings(ours.config) == settings(recipe), name
