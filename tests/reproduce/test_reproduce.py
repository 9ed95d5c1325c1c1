"""Tables and figures really run, on very few scenes."""

from __future__ import annotations

import json
import os
import signal
import statistics
from importlib import import_module
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.cli.signals import end_on_sigterm
from counterfoil.core.progress import Silent
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.evaluation.evaluate import flat_metrics
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.reproduce.collect import collect, curve
from counterfoil.reproduce.measure import RunEvaluator
from counterfoil.reproduce.plots import charts_of
from counterfoil.reproduce.present import to_markdown, write_reproduction
from counterfoil.reproduce.results import Reproduction
from counterfoil.reproduce.runner import Outcome, carry_out, describe
from counterfoil.reproduce.spread import Measure
from counterfoil.reproduce.workers import Workers
from counterfoil.training.run_data import read_data
from counterfoil.training.run_folder import is_finished, load_model
from tests.conftest import thinned
from tests.reproduce.conftest import TINY, planned, tiny


def shown(plan, cache, outcome=None) -> Reproduction:
    return collect(
        plan, outcome or Outcome(), RunEvaluator(plan.out / "evaluations", cache, Silent())
    )


def train(plan, cache, **options) -> Outcome:
    return carry_out(plan, cache, Silent(), **options)


def finish(plan, cache) -> Reproduction:
    outcome = train(plan, cache)
    assert not outcome.errors
    return shown(plan, cache, outcome)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_mean_and_deviation_are_those_of_a_sample(values) -> None:
    results = Measure.over(values)
    assert results.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    if len(values) > 1:
        assert results.std == pytest.approx(statistics.stdev(values), abs=1e-4)
    else:
        assert results.std is None


def in_steps(**change: Any) -> dict[str, Any]:
    """The tiny table with five steps in an epoch, to be stopped between them."""
    tree = tiny(**change)
    tree["base"]["common"]["train"]["batch_size"] = 9
    return tree


@pytest.mark.slow
def test_a_run_of_a_table_that_was_cut_off_resumes_to_the_same_metrics(tmp_path, cache) -> None:
    tree = in_steps(rows=TINY["rows"][1:])
    tree["base"]["common"]["train"]["epochs"] = 1
    plan, whole = planned(tree, tmp_path / "cut"), planned(tree, tmp_path / "whole")
    (run,) = plan.in_order()
    calls = iter([False] * 3)
    assert train(plan, cache, should_stop=lambda: next(calls, True)).interrupted
    assert run.state == "unfinished"
    assert train(plan, cache).trained == 1
    assert train(plan, cache).trained == 0
    train(whole, cache)
    metrics = [one.in_order()[0].folder / "metrics.jsonl" for one in (plan, whole)]
    assert metrics[0].read_bytes() == metrics[1].read_bytes()


@pytest.mark.slow
def test_a_table_that_was_interrupted_goes_on_and_then_trains_nothing(tmp_path, cache) -> None:
    plan = planned(in_steps(), tmp_path, seeds=2)
    first, second, *_ = plan.in_order()
    stopped = train(plan, cache, should_stop=lambda: is_finished(first.folder))
    assert stopped.interrupted
    assert stopped.trained == 1
    assert [run.state for run in plan.in_order()] == ["finished", "new", "new", "new"]

    calls = iter([False] * 6)  # the second run is cut off in its middle
    train(plan, cache, should_stop=lambda: next(calls, True))
    assert second.state == "unfinished"
    partial = to_markdown(shown(plan, cache))
    assert "not finished" in partial
    assert "all: 1 of 2 seeds not finished" in partial

    assert train(plan, cache).trained == 3
    assert train(plan, cache).trained == 0
    kept = (second.folder / "metrics.jsonl").read_bytes()
    whole = planned(in_steps(), tmp_path / "whole").runs["hard"][0]
    train(planned(in_steps(rows=[TINY["rows"][1]]), tmp_path / "whole"), cache)
    assert (whole.folder / "metrics.jsonl").read_bytes() == kept

    results = shown(plan, cache)
    for row, name in zip(results.rows, ("all", "hard"), strict=True):
        reports = [
            flat_metrics(RetrievalReport.from_json((run.folder / "results.json").read_text()))
            for run in plan.runs[name]
        ]
        for metric, measure in row.numbers.items():
            values = [report[metric] for report in reports]
            assert measure.mean == pytest.approx(statistics.fmean(values))
            assert measure.std == pytest.approx(statistics.stdev(values))


def test_what_is_written_says_it_all(out, cache, tmp_path) -> None:
    results = finish(planned(tiny(), out, seeds=2), cache)
    page = write_reproduction(results, tmp_path)
    assert (tmp_path / "tiny.md").read_text() == page
    assert Reproduction.from_json((tmp_path / "tiny.json").read_text()) == results
    rsum = results.rows[0].numbers["rsum"]
    line = next(line for line in page.splitlines() if line.startswith("| all"))
    assert line.endswith(f"| {rsum.mean:.1f} ± {rsum.std:.1f} (21.0) |")
    assert "Our runs use other data" in page
    svg = (tmp_path / "rsum.svg").read_text()
    (axes,) = charts_of(results)[0].draw().axes
    assert len(axes.patches) == 3  # two of ours, one published
    assert f">{rsum.mean:.1f}</text>" in svg
    assert ">21.0</text>" in svg
    assert (tmp_path / "rsum.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_that_fails_says_why_and_the_others_are_there(out, cache) -> None:
    runs = TINY["runs"] | {
        "odd": {"common": {"objective": {"hardest": {"margni": 1}}}},
        "after": {"common": {"objective": {"hardest": {"margin": "{run:odd}"}}}},
    }
    rows = [
        {"label": ["odd"], "run": "odd"},
        {"label": ["after"], "run": "after"},
        *TINY["rows"],
    ]
    plan = planned(tiny(runs=runs, rows=rows), out)
    outcome = train(plan, cache)
    results = shown(plan, cache, outcome)
    page = to_markdown(results)
    assert "| odd |  |  |  |  |  |  | failed |" in page
    assert "margni" in page
    assert "after: failed: after, seed 0: needs odd, seed 0, which failed" in page
    assert results.rows[2].numbers["rsum"].mean > 0
    assert not results.complete


def test_an_ensemble_row_averages_the_scores_of_its_members(out, cache) -> None:
    from counterfoil.evaluation.evaluate import evaluate

    rows = [
        {"label": ["both"], "ensemble": ["all", "hard"]},
        {"label": ["one"], "ensemble": ["all", "all"]},
        {"label": ["all"], "run": "all"},
        {"label": ["alike"], "ensemble": ["all", "hard"], "standardize": True},
        {"label": ["paper"], "published_only": True, "published": TINY["rows"][0]["published"]},
    ]
    plan = planned(tiny(rows=rows), out)
    results = finish(plan, cache)
    members = [load_model(plan.runs[name][0].folder, "cpu") for name in ("all", "hard")]
    split = read_data(plan.runs["all"][0].config, cache, Silent()).test
    assert results.rows[0].numbers["rsum"].mean == evaluate(members, split, bootstrap=0).rsum
    assert results.rows[1].numbers == results.rows[2].numbers
    alike = evaluate(members, split, bootstrap=0, standardize=True)
    assert results.rows[3].numbers["rsum"].mean == alike.rsum
    assert results.rows[3].recipe != results.rows[0].recipe
    assert not results.rows[4].numbers
    assert "| paper | (1.0) | (2.0) | (3.0) | (4.0) | (5.0) | (6.0) | (21.0) |" in to_markdown(
        results
    )
    kept = list((out / "evaluations").glob("*.json"))
    before = [path.stat().st_mtime_ns for path in kept]
    assert shown(plan, cache) == results
    assert [path.stat().st_mtime_ns for path in kept] == before


def test_another_protocol_judges_the_same_run_again(out, cache) -> None:
    plan = planned(tiny(), out)
    finish(plan, cache)
    judge = RunEvaluator(out / "evaluations", cache, Silent())
    run = plan.runs["all"][0]
    folds = judge.report([run], folds=3)
    assert (folds.protocol, folds.folds) == ("folds", 3)
    assert judge.report([run], folds=0) == judge.report([run])


@pytest.mark.slow
def test_a_sweep_draws_every_value(out, cache, tmp_path) -> None:
    tree = tiny(
        kind="sweep", run="all", key="objective.triplet.margin", values=[0.0, 0.02, 0.2],
        x_label="margin", rows=None, columns=None,
    )  # fmt: skip
    finish(planned(tiny(), out), cache)
    plan = planned(tree, out)
    assert plan.runs["all, margin=0.2"][0].state == "finished"  # the row of the table
    results = finish(plan, cache)
    assert [row.value for row in results.rows] == [0.0, 0.02, 0.2]
    page = write_reproduction(results, tmp_path)
    assert "| 0.02 |" in page
    svg = (tmp_path / "rsum.svg").read_text()
    assert all(f">{value}</text>" in svg for value in ("0", "0.02", "0.2"))
    (axes,) = charts_of(results)[0].draw().axes
    assert len(axes.containers[0].lines[0].get_xdata()) == 3
    assert (tmp_path / "rsum.png").exists()


@pytest.mark.slow
def test_lines_of_a_sweep_are_drawn_and_stand_beside_the_papers(out, cache, tmp_path) -> None:
    lines = [
        {"label": "A", "run": "all", "published": {"f30k": [None, 21.5]}},
        {"label": "B", "run": "hard"},
    ]
    tree = tiny(
        kind="sweep", lines=lines, key="train.batch_size", values=[12, 24], x_label="batch",
        rows=None, columns=None,
    )  # fmt: skip
    results = finish(planned(tree, out), cache)
    page = write_reproduction(results, tmp_path)
    assert "| Model | batch |" in page
    line = next(line for line in page.splitlines() if line.startswith("| A | 24 |"))
    assert line.endswith(" (21.5) |")
    (axes,) = charts_of(results)[0].draw().axes
    assert [len(line.lines[0].get_xdata()) for line in axes.containers] == [2, 2]
    assert [line.get_label() for line in axes.containers] == ["A", "B"]
    assert (tmp_path / "rsum.png").exists()


def test_curves_show_metrics_of_training_and_say_what_was_not_logged(out, cache, tmp_path) -> None:
    panels = [
        {"metric": "loss", "title": "Loss"},
        {"metric": "dev.rsum", "title": "Quality"},
        {"metric": "grad_norm", "title": "Gradient", "remainder": "rest"},
        {"metric": "no/such", "title": "Nothing"},
    ]
    results = finish(planned(tiny(kind="curves", panels=panels), out, seeds=2), cache)
    loss, quality, norm, nothing = results.plots
    assert [line.name for line in loss.curves] == ["all", "hard"]
    assert [x for x, _, _ in quality.curves[0].points] == [1.0, 2.0]
    assert [line.name for line in norm.curves] == ["all", "rest", "hard", "rest"]
    assert norm.curves[1].points[0][1] == pytest.approx(1 - norm.curves[0].points[0][1])
    assert not nothing.curves
    page = write_reproduction(results, tmp_path)
    assert "no finished run logged 'no/such'" in page
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "loss.svg", "dev-rsum.svg", "grad-norm.svg",
    }  # fmt: skip
    (axes,) = charts_of(results)[2].draw().axes
    assert [line.get_label() for line in axes.get_lines()] == [
        "all", "all: rest", "hard", "hard: rest",
    ]  # fmt: skip
    assert len(axes.collections) == 4  # the deviations of two seeds, as bands


def test_a_long_curve_is_averaged_over_neighbors_and_over_seeds() -> None:
    def log(offset: float) -> list[dict[str, object]]:
        steps = [{"kind": "step", "step": s, "epoch": 0, "a": s + offset} for s in range(1, 401)]
        return [*steps, {"kind": "epoch", "step": 400, "epoch": 4, "a": 1e9}]

    points = curve([log(0.0), log(2.0)], "a")
    assert len(points) == 200
    assert points[0] == pytest.approx((1.5 / 100, 2.5, 2**0.5))
    assert points[-1][1] == pytest.approx(400.5)
    assert curve([], "a") == []


def test_a_scatter_measures_speed_beside_quality(out, cache, tmp_path) -> None:
    results = finish(planned(tiny(kind="scatter", repeats=1), out), cache)
    for row in results.rows:
        assert row.speed is not None
        assert 0 < row.speed.kpps <= row.speed.matching_kpps
        assert (row.speed.images, row.speed.captions) == (12, 24)
    page = write_reproduction(results, tmp_path)
    assert "Kpps" in page
    assert ">hard</text>" in (tmp_path / "speed.svg").read_text()


def test_a_run_that_another_process_is_training_is_waited_for(out, cache) -> None:
    plan = planned(tiny(rows=[TINY["rows"][0]]), out, overrides=("train.epochs=1",))
    run = plan.runs["all"][0]
    lines = Lines()
    with locked_in_turn(out / "locks" / run.digest, "making it", lines) as mine:
        assert mine
        stop = iter([False, True])
        outcome = carry_out(plan, cache, lines, should_stop=lambda: next(stop))
    assert outcome.interrupted
    assert run.state == "new"
    assert lines.said == ["run 1/1: all, seed 0"]
    assert train(plan, cache).trained == 1


class Lines(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def crash(run, cache, progress, should_stop, *_) -> bool:
    os._exit(7)


def refuse(run, cache, progress, should_stop, *_) -> bool:
    progress.say("about to fail")
    raise ValueError("no good")


@pytest.mark.slow
@pytest.mark.parametrize(("work", "message"), [(crash, "code 7"), (refuse, "ValueError: no good")])
def test_a_worker_that_dies_is_a_failed_run_and_no_more(work, message, tmp_path) -> None:
    workers = Workers(tmp_path, 1, work, describe)
    workers.start(planned(tiny(), tmp_path).runs["all"][0])
    lines, ended = Lines(), []
    while workers.busy:
        ended += workers.poll(lines)
    assert [message in one.error for one in ended] == [True]
    assert lines.said == (["all, seed 0: about to fail"] if work is refuse else [])


@pytest.mark.slow
def test_processes_side_by_side_give_the_same_runs(out, cache, tmp_path) -> None:
    alone = finish(planned(tiny(), out), cache)
    plan = planned(tiny(), tmp_path)
    lines = Lines()
    outcome = carry_out(plan, cache, lines, jobs=2)
    assert (outcome.trained, outcome.errors) == (2, {})
    assert any(line.startswith("hard, seed 0: epoch 2/2") for line in lines.said)
    together = shown(plan, cache, outcome)
    assert [row.numbers for row in together.rows] == [row.numbers for row in alone.rows]


@pytest.mark.slow
def test_the_command_lists_plans_runs_and_prints(out, cache, tmp_path) -> None:
    def invoke(*args: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["reproduce", *map(str, args)])
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    assert "selhn.table1" in invoke()
    assert any(one["name"] == "selhn.figure6" for one in json.loads(invoke("--list", "--json")))
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny()))
    where = [file, "--out", out, "--cache", cache, "--seeds", 2]
    finish(planned(tiny(), out, seeds=2), cache)
    plan = json.loads(invoke(*where, "--dry-run", "--json"))
    assert [run["state"] for run in plan] == ["finished"] * 4
    assert "4 of 4 runs finished" in invoke(*where, "--dry-run")
    assert "| hard |" in invoke(*where)
    assert (out / "tiny-scenes" / "tiny.md").is_file()
    broken = invoke(*where, "objective.hardest.margni=1", "--seeds", 1, code=1)
    assert "failed" in broken


INTERRUPTED = (signal.SIGINT, 130, "counterfoil.reproduce.collect.collect")
TERMINATED = (signal.SIGTERM, 143, "counterfoil.training.run._conclude")


@pytest.mark.parametrize(
    ("sent", "code", "phase"),
    thinned(
        [
            INTERRUPTED,
            TERMINATED,
            (*INTERRUPTED[:2], TERMINATED[2]),
            (*TERMINATED[:2], INTERRUPTED[2]),
        ],
        TERMINATED,
    ),
)
def test_one_signal_after_training_ends_the_command_with_its_code(
    sent, code, phase, cache, tmp_path, monkeypatch
) -> None:
    module, _, name = phase.rpartition(".")
    real = getattr(import_module(module), name)
    received = []

    def interrupted(*args: Any, **options: Any) -> Any:
        if not received:
            received.append(sent)
            signal.raise_signal(sent)
        return real(*args, **options)

    monkeypatch.setattr(phase, interrupted)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny(rows=[TINY["rows"][0]])))
    words = [file, "train.epochs=1", "--out", tmp_path, "--cache", cache, "--seeds", 1]
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    end_on_sigterm()
    try:
        result = CliRunner().invoke(app, ["reproduce", *map(str, words)])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert received == [sent]
    assert result.exit_code == code, (result.output, result.exception)
    monkeypatch.setattr(phase, real)
    again = CliRunner().invoke(app, ["reproduce", *map(str, words)])
    assert again.exit_code == 0, (again.output, again.exception)
    assert "| all |" in again.stdout
