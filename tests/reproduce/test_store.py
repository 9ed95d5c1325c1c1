"""Results that outlive the runs: kept seed by seed, shown again, and not trained twice."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError, DivergedError
from counterfoil.core.progress import Silent
from counterfoil.reproduce import plan as planned_runs
from counterfoil.reproduce.catalogue import labels, only_rows
from counterfoil.reproduce.collect import collect
from counterfoil.reproduce.measure import RunEvaluator
from counterfoil.reproduce.plan import Settings, digest_of, make_plan, recipe_of
from counterfoil.reproduce.present import (
    body,
)
from counterfoil.reproduce.results import (
    Reproduction,
    RowResult,
    SeedResult,
    note_sharing,
    read_cost,
    table_rows,
)
from counterfoil.reproduce.runner import Outcome, describe
from counterfoil.reproduce.spec import build_artifact
from counterfoil.reproduce.store import (
    ResultCache,
    best_values,
    known_results,
    merged,
    read_stored,
    skip_known,
    stored_name,
    write_stored,
)
from tests.reproduce.conftest import TINY, planned, tiny
from tests.reproduce.test_reproduce import finish, shown, train

PAGE = "# Results\n\n<!-- results: {} -->\nold\n<!-- /results -->\n\nWhat it means.\n"


def result(seed: int, rsum: float, recipe: str = "r", **more: float) -> SeedResult:
    return SeedResult(seed=seed, recipe=recipe, numbers={"rsum": rsum, **more})


def row(name: str, *each: SeedResult, recipe: str = "r", **more) -> RowResult:
    return RowResult(label=[name], recipe=recipe, **more).with_each(each)


def table(*rows: RowResult, **more) -> Reproduction:
    given = {"title": "T", "paper": "P", "data": "lite", "scale": "full", "seeds": 1}
    return Reproduction(
        name="t", kind="table", overrides=[], columns=["Model"], rows=list(rows), **given, **more
    )


def known(*stored: Reproduction) -> dict[str, dict[int, SeedResult]]:
    return known_results(stored, ("test", None))


@given(
    st.dictionaries(st.integers(0, 5), st.floats(0, 600), max_size=4),
    st.dictionaries(st.integers(0, 5), st.floats(0, 600), max_size=4),
)
def test_seeds_of_two_calls_are_one_row_and_the_new_ones_win(old, new) -> None:
    before = table(row("a", *(result(seed, value) for seed, value in old.items())))
    now = table(row("a", *(result(seed, value) for seed, value in new.items())))
    (results,) = merged(before, now, known(before)).rows
    expected = old | new
    assert {one.seed: one.numbers["rsum"] for one in results.each} == expected
    assert [one.seed for one in results.each] == sorted(expected)
    if expected:
        assert results.numbers["rsum"].mean == pytest.approx(statistics.fmean(expected.values()))
        assert results.numbers["rsum"].seeds == len(expected)


def test_other_settings_replace_what_was_known_and_other_rows_stay() -> None:
    before = table(row("a", result(0, 1.0), result(1, 2.0)), row("b", result(0, 3.0, "b")))
    now = table(
        row("a", result(0, 9.0, "new"), recipe="new"), row("c", result(0, 4.0, "c"), recipe="c")
    )
    results = merged(before, now, known(before), [["c"], ["b"], ["a"]])
    assert [(one.label, one.numbers["rsum"].mean) for one in results.rows] == [
        (["c"], 4.0), (["b"], 3.0), (["a"], 9.0),
    ]  # fmt: skip
    gone = merged(before, now, known(before), [["c"], ["a"]])  # the artefact no longer has a row b
    assert [one.label for one in gone.rows] == [["c"], ["a"]]


def test_numbers_that_were_measured_before_stay_beside_new_ones() -> None:
    before = table(row("a", result(0, 1.0, tau=5.0)))
    (results,) = merged(before, table(row("a", result(0, 2.0))), known(before)).rows
    assert results.each[0].numbers == {"rsum": 2.0, "tau": 5.0}


def test_a_row_that_was_known_is_not_missing_because_its_runs_are_gone() -> None:
    before = table(row("a", result(0, 1.0)))
    (results,) = merged(before, table(row("a", missing=1)), known(before)).rows
    assert results.missing == 0
    assert results.numbers["rsum"].mean == 1.0


def test_what_is_missing_is_counted_of_what_the_row_was_asked_for() -> None:
    ahead = row("a", result(0, 1.0), result(1, 2.0), missing=1)
    assert "a: 1 of 3 seeds not finished." in body(table(ahead, row("b", result(0, 1.0))))


@pytest.mark.slow
def test_what_the_store_knows_is_not_trained_elsewhere(out, cache, tmp_path) -> None:
    first = planned(tiny(), out, seeds=1)
    results = finish(first, cache)
    order = labels(first.artifact)
    kept = ResultCache(tmp_path / "store", first, order)
    assert kept.add(results) == results

    later = planned(tiny(), tmp_path / "fresh", seeds=2)  # a machine on which nothing is
    again = ResultCache(tmp_path / "store", later, order)
    again.skip_known()
    assert [run.config.seed for run in later.missing()] == [1, 1]
    assert not train(later, cache).errors
    both = again.add(shown(later, cache))
    for one, before in zip(both.rows, results.rows, strict=True):
        assert [each.seed for each in one.each] == [0, 1]
        assert one.each[0] == before.each[0]
    assert both.complete
    text = (tmp_path / "store" / "tiny@scenes.json").read_text()
    assert str(tmp_path) not in text
    assert Reproduction.from_json(text) == both


def test_a_changed_setting_is_trained_although_the_row_is_known(tmp_path) -> None:
    plan = planned(tiny(), tmp_path)
    rows = [each.result for each in table_rows(plan)]
    stored = table(*(one.with_each([result(0, 1.0, one.recipe)]) for one in rows))
    skip_known(plan, known(stored))
    assert plan.missing() == []
    other = planned(tiny(), tmp_path, overrides=("train.epochs=3",))
    skip_known(other, known(stored))
    assert len(other.missing()) == 2


def test_a_row_is_known_from_another_table_but_not_from_another_protocol(tmp_path) -> None:
    plan = planned(tiny(), tmp_path)
    rows = [each.result for each in table_rows(plan)]
    other = table(*(one.with_each([result(0, 7.0, one.recipe)]) for one in rows))
    order = labels(plan.artifact)
    for change in ({"folds": 5}, {"judged_on": "dev"}):
        write_stored(tmp_path / "store", other.model_copy(update=change), "other@scenes.json")
        kept = ResultCache(tmp_path / "store", plan, order)
        kept.skip_known()
        assert len(plan.missing()) == 2
    write_stored(tmp_path / "store", other, "other@scenes.json")
    kept = ResultCache(tmp_path / "store", plan, order)
    kept.skip_known()
    assert plan.missing() == []
    empty = table(*(one.model_copy(update={"missing": 1}) for one in rows))
    assert [one.numbers["rsum"].mean for one in kept.add(empty).rows] == [7.0, 7.0]


def test_calls_at_the_same_time_lose_nothing_of_each_other(tmp_path) -> None:
    plan = planned(tiny(), tmp_path)
    first, second = (each.result for each in table_rows(plan))
    store, order = tmp_path / "store", labels(plan.artifact)
    calls = [ResultCache(store, plan, order) for _ in range(3)]  # all begin before any of them ends
    calls[0].add(table(first.with_each([result(0, 1.0, first.recipe)])))
    calls[1].add(table(second.with_each([result(0, 2.0, second.recipe)])))
    both = calls[2].add(table(first.with_each([result(1, 3.0, first.recipe)])))
    assert [[(e.seed, e.numbers["rsum"]) for e in one.each] for one in both.rows] == [
        [(0, 1.0), (1, 3.0)],
        [(0, 2.0)],
    ]
    assert [path.name for path in store.iterdir()] == ["tiny@scenes.json"]


@pytest.mark.parametrize("of", [digest_of, recipe_of])
def test_what_mixed_precision_computed_otherwise_is_another_result(of, monkeypatch) -> None:
    single, mixed = (build_config({"train": {"precision": p}}) for p in ("float32", "bf16"))
    before = of(single), of(mixed)
    monkeypatch.setattr(
        planned_runs, "MIXED_PRECISION_REVISION", planned_runs.MIXED_PRECISION_REVISION + 1
    )
    assert of(single) == before[0]
    assert of(mixed) != before[1]


@pytest.mark.parametrize("of", [digest_of, recipe_of])
def test_what_a_matcher_computed_otherwise_is_another_result(of, monkeypatch) -> None:
    configs = [build_config({"model": {"name": name}}) for name in ("naaf-positive", "scan-t2i")]
    before = [of(config) for config in configs]
    monkeypatch.setitem(planned_runs.REVISIONS, "naaf", planned_runs.REVISIONS["naaf"] + 1)
    assert [of(config) == known for config, known in zip(configs, before, strict=True)] == [
        False,
        True,
    ]


def test_a_call_that_found_nothing_takes_nothing_away() -> None:
    before = table(row("a", result(0, 1.0)), row("b", result(0, 2.0)))
    stopped = table(
        row("a", recipe="new", missing=1), row("b", result(0, 3.0, "new"), recipe="new")
    )
    rows = merged(before, stopped).rows
    assert [one.numbers["rsum"].mean for one in rows] == [1.0, 3.0]
    assert [one.recipe for one in rows] == ["r", "new"]


@pytest.mark.parametrize(
    ("rows", "said"), [(["a"], ["train.epochs=3"]), (["a", "b"], ["train.epochs=3", "seed=1"])]
)
def test_a_file_says_only_what_is_true_of_all_its_rows(rows, said) -> None:
    first = table(row("a", result(0, 1.0)), row("b", result(0, 1.0)))
    first = first.model_copy(update={"overrides": ["train.epochs=3"]})
    second = table(*(row(label, result(0, 2.0)) for label in rows))
    second = second.model_copy(update={"overrides": ["train.epochs=3", "seed=1"]})
    assert merged(first, second).overrides == said


def test_a_run_that_diverged_is_a_result_until_it_has_numbers(tmp_path) -> None:
    plan = planned(tiny(), tmp_path)
    errors = {job.digest: describe(DivergedError("the loss is nan")) for job in plan.missing()[:1]}
    now = collect(plan, Outcome(errors), RunEvaluator(tmp_path, tmp_path, Silent()))
    assert [one.diverged for one in now.rows] == [True, *[False] * (len(now.rows) - 1)]
    diverged = now.rows[0].model_copy(update={"label": ["a"]})
    before = merged(table(row("a", missing=1)), table(diverged))
    (kept,) = read_stored(write_stored(tmp_path, before, "x.json")).rows
    assert (kept.diverged, kept.errors, kept.missing) == (True, [], 0)
    (kept,) = merged(before, table(row("a", missing=1))).rows
    assert kept.diverged
    (kept,) = merged(before, table(row("a", result(0, 1.0)))).rows
    assert not kept.diverged
    (kept,) = merged(table(row("a", result(0, 1.0))), table(diverged)).rows
    assert kept.each
    assert not kept.diverged


def test_a_run_that_diverged_is_not_trained_again_and_what_needs_it_did_not_diverge(
    tmp_path,
) -> None:
    runs = TINY["runs"] | {
        "after": {"common": {"model": {"init_from": "{run:hard}"}, "objective": {"hardest": {}}}}
    }
    rows = [{"label": ["hard"], "run": "hard"}, {"label": ["after"], "run": "after"}]
    tree = tiny(runs=runs, rows=rows)
    plan = planned(tree, tmp_path)
    hard, after = plan.missing()
    reason = describe(DivergedError("the loss is nan"))
    errors = {hard.digest: reason, after.digest: f"needs hard, which failed: {reason}"}
    now = collect(plan, Outcome(errors), RunEvaluator(tmp_path, tmp_path, Silent()))
    assert [one.diverged for one in now.rows] == [True, False]
    ResultCache(tmp_path / "store", plan, labels(plan.artifact)).add(now)
    later = planned(tree, tmp_path)
    ResultCache(tmp_path / "store", later, labels(later.artifact)).skip_known()
    assert hard.digest in later.settled
    assert after.digest not in later.settled


def test_failures_are_not_kept_but_for_what_is_missing(tmp_path) -> None:
    path = "/somewhere/here: damaged"
    rows = row("a", result(0, 1.0), errors=[path]), row("b", errors=[path])
    write_stored(tmp_path, table(*rows), "t@lite.json")
    assert "somewhere" not in (tmp_path / "t@lite.json").read_text()
    results = read_stored(tmp_path / "t@lite.json")
    assert [one.missing for one in results.rows] == [0, 1]


def test_a_known_run_is_trained_where_another_needs_it(tmp_path) -> None:
    runs = TINY["runs"] | {
        "after": {"common": {"model": {"init_from": "{run:hard}"}, "objective": {"hardest": {}}}}
    }
    rows = [{"label": ["hard"], "run": "hard"}, {"label": ["after"], "run": "after"}]
    plan = planned(tiny(runs=runs, rows=rows), tmp_path)
    plan.settled = {plan.runs["hard"][0].digest}
    assert [job.name for job in plan.missing()] == ["hard", "after"]
    plan.settled |= {plan.runs["after"][0].digest}
    assert plan.missing() == []


def test_a_dry_run_says_what_the_store_knows_and_what_is_not_needed(tmp_path) -> None:
    runs = TINY["runs"] | {
        "after": {"common": {"model": {"init_from": "{run:hard}"}, "objective": {"hardest": {}}}}
    }
    tree = tiny(runs=runs, rows=[{"label": ["after"], "run": "after"}])
    file, store = tmp_path / "tiny.yaml", tmp_path / "store"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")

    def states() -> dict[str, str]:
        args = [str(file), "--seeds", "1", "--dry-run", "--json", "--out", str(tmp_path)]
        shown = CliRunner().invoke(app, ["reproduce", *args, "--store", str(store)])
        assert shown.exit_code == 0, shown.output
        return {job["run"]: job["state"] for job in json.loads(shown.stdout)}

    assert states() == {"hard, seed 0": "new", "after, seed 0": "new"}
    plan = planned(tree, tmp_path)
    rows = [one.result for one in table_rows(plan)]
    results = table(*(one.with_each([result(0, 1.0, one.recipe)]) for one in rows))
    write_stored(store, results, stored_name(plan))
    assert states() == {"hard, seed 0": "not needed", "after, seed 0": "known"}


def test_a_recipe_is_the_same_for_all_seeds_and_on_all_machines(tmp_path) -> None:
    runs = TINY["runs"] | {
        "led": {"like": "hard", "beside": {"ndgl": {"guide": "{guide:hard@+1,hard@+2}"}}}
    }
    tree = tiny(runs=runs, rows=[{"label": ["led"], "run": "led"}])
    for folder in ("one", "two"):
        (tmp_path / folder / "lite").mkdir(parents=True)
    plans = [
        planned(tree, tmp_path / folder, seeds=2, data=str(tmp_path / folder / "lite"))
        for folder in ("one", "two")
    ]
    recipes = {run.recipe for plan in plans for run in plan.runs["led"]}
    digests = {run.digest for plan in plans for run in plan.runs["led"]}
    assert len(recipes) == 1
    assert len(digests) == 4
    changed = planned(tree, tmp_path, data="lite", overrides=("train.epochs=9",))
    assert changed.runs["led"][0].recipe not in recipes


def test_rows_are_chosen_by_label_or_run() -> None:
    artifact = build_artifact(tiny(), "tiny.yaml")
    assert labels(only_rows(artifact, ["H*"])) == [["hard"]]
    assert labels(only_rows(artifact, ["hard", "all"])) == [["all"], ["hard"]]
    assert only_rows(artifact, []) == artifact
    with pytest.raises(ConfigError, match=r"no row of tiny matches \(it has: all; hard\)"):
        only_rows(artifact, ["soft"])


def test_a_claim_of_a_row_that_is_not_there_is_refused() -> None:
    claims = [{"text": "x", "better": "hrad", "worse": "all"}]
    with pytest.raises(ConfigError, match="no row 'hrad'; did you mean 'hard'"):
        build_artifact(tiny(claims=claims), "tiny.yaml")


SWEEP = {
    "kind": "sweep",
    "columns": None,
    "rows": None,
    "lines": [{"label": "All", "run": "all"}, {"label": "Hard", "run": "hard"}],
    "key": "train.optimizer.lr",
    "values": [1.0e-4, 1.0e-2],
    "x_label": "rate",
    "judged_on": "dev",
}


@pytest.mark.slow
def test_a_sweep_on_dev_shows_dev_and_its_best_values_reach_the_runs(out, cache, tmp_path) -> None:
    plan = planned(tiny(**SWEEP), out)
    results = finish(plan, cache)
    for one, (run,) in zip(results.rows, plan.runs.values(), strict=True):
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        epochs = [r for r in map(json.loads, lines) if r["kind"] == "epoch"]
        assert one.numbers["rsum"].mean == max(r["dev"]["rsum"] for r in epochs)
    lines = body(results).splitlines()
    assert lines[0].split("|")[2:4] == [" 0.0001 ", " 0.01 "]
    for label, line in (("All", lines[2]), ("Hard", lines[3])):
        rsum = {one.value: one.numbers["rsum"] for one in results.rows if one.label[0] == label}
        most = max(number.mean for number in rsum.values())
        texts = (number.text() for number in (rsum[1e-4], rsum[1e-2]))
        means = (number.mean for number in (rsum[1e-4], rsum[1e-2]))
        cells = [f"**{t}**" if m == most else t for t, m in zip(texts, means, strict=True)]
        assert [cell.strip() for cell in line.split("|")[1:4]] == [label, *cells]
    values = best_values(results)
    assert set(values) == {"all", "hard"}
    own = {"train": {"optimizer": {"lr": 3.0e-5}}}
    runs = TINY["runs"] | {"harder": {"like": "hard"}, "own": {"like": "hard", "common": own}}
    rows = [{"label": [name], "run": name} for name in runs]
    artifact = build_artifact(tiny(runs=runs, rows=rows), "tiny.yaml")
    tuned = make_plan(artifact, Settings(seeds=1, tuned=values), tmp_path).runs
    by_line = {one.varied_run: [] for one in results.rows}
    for one in results.rows:
        by_line[one.varied_run].append((one.numbers["rsum"].mean, -one.value))
    for name, line in (("all", "all"), ("hard", "hard"), ("harder", "hard")):
        assert tuned[name][0].config.train.optimizer.lr == -max(by_line[line])[1]
    assert tuned["own"][0].config.train.optimizer.lr == 3.0e-5


def test_a_damaged_file_of_the_store_is_named(tmp_path) -> None:
    assert read_stored(tmp_path / "x.json") is None
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json"):
        read_stored(tmp_path / "x.json")


def test_other_data_and_scales_have_files_of_their_own(tmp_path) -> None:
    def name(**settings) -> str:
        return stored_name(planned(tiny(), tmp_path, **settings))

    given = [{}, {"data": "a/lite"}, {"data": "b/other"}, {"data": "a/lite", "scale": "smoke"}]
    assert len({name(**one) for one in given}) == 4
    assert name(data="a/lite") == name(data="/b/lite") == "tiny@lite.json"


def test_the_cost_of_a_run_is_read_from_its_logs(out, cache) -> None:
    plan = planned(tiny(), out)
    finish(plan, cache)
    run = plan.in_order()[0]
    alone = read_cost(run.folder)
    last = (run.folder / "timing.jsonl").read_text().splitlines()[-1]
    assert alone.seconds == json.loads(last)["seconds"]
    assert alone.updates == json.loads(last)["step"]
    assert alone.best_epoch in (1, 2)
    note_sharing(run.folder, 4)
    assert read_cost(run.folder).device_seconds == pytest.approx(alone.seconds / 4)
    assert read_cost(run.folder).gpu_seconds is None  # a CPU's time is not a GPU's
    timing = run.folder / "timing.jsonl"
    kept = timing.read_text()
    timing.write_text(kept.replace('"device": "cpu"', '"device": "cuda"') + '{"step": 9, "sec')
    assert read_cost(run.folder).gpu_seconds == pytest.approx(alone.seconds / 4)
    timing.write_text(kept)
    note_sharing(run.folder, 1)
    assert read_cost(Path("nowhere")).seconds is None


def test_the_command_keeps_chooses_and_fills(out, cache, tmp_path) -> None:
    import yaml

    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in tiny().items() if k != "name"}))
    options = ["--seeds", "1", "--out", str(out), "--cache", str(cache)]
    options += ["--store", str(tmp_path / "store")]

    def call(*words: str) -> str:
        done = CliRunner().invoke(app, ["reproduce", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "| hard" in call(str(file), *options, "--rows", "hard")
    stored = read_stored(tmp_path / "store" / "tiny@scenes.json")
    assert [one.label for one in stored.rows] == [["hard"]]
    call(str(file), *options)
    stored = read_stored(tmp_path / "store" / "tiny@scenes.json")
    assert [one.label for one in stored.rows] == [["all"], ["hard"]]
    elsewhere = ["--out", str(tmp_path / "fresh"), "--dry-run"]  # where no run is
    states = call(str(file), *options, *elsewhere).split("│")
    assert (states.count(" known "), states.count("   new ")) == (2, 0)
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("tiny@scenes"))
    assert "1 sections" in call("--render-page", str(page), "--store", str(tmp_path / "store"))
    assert "| hard" in page.read_text()


def test_judgements_and_costs_are_columns(out, cache, tmp_path) -> None:
    from counterfoil.reproduce.columns import FoilOptions, MeasureColumn
    from counterfoil.reproduce.measure import MeasureEvaluator

    plan = planned(tiny(), out)
    finish(plan, cache)
    (run,) = plan.runs["hard"]
    judge = MeasureEvaluator(RunEvaluator(tmp_path, cache, Silent()), FoilOptions(captions=20))
    for number in ("word_auc", "pair_accuracy"):
        column = MeasureColumn(title="w", foils="rules", number=number)
        value = judge.number(column, run, None)
        assert value is not None
        assert 0 <= value <= 100
    people = MeasureColumn(title="p", judgements="Expert.txt", number="tau")
    assert judge.number(people, run, None) is None  # the scenes lie in no folder
    cost = MeasureColumn(title="c", number="best_epoch")
    assert judge.number(cost, run, None) == read_cost(run.folder).best_epoch
    with pytest.raises(ValueError, match="either foils or judgements"):
        MeasureColumn(title="x", foils="rules", judgements="a", number="tau")
