"""A sweep that chooses a value does not end at an edge of its grid."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import ConfigError
from counterfoil.reproduce.grid import (
    at_an_edge,
    edge,
    latest,
    next_value,
    value_beyond,
    widened,
    with_tried,
    with_value,
)
from counterfoil.reproduce.results import Reproduction, RowResult, SeedResult
from counterfoil.reproduce.spec import build_artifact
from tests.reproduce.conftest import tiny

SWEEP = {
    "kind": "sweep",
    "columns": None,
    "rows": None,
    "lines": [{"label": "All", "run": "all"}, {"label": "Hard", "run": "hard"}],
    "key": "train.optimizer.lr",
    "values": [0.001, 0.002, 0.004],
    "beyond": 2,
    "x_label": "rate",
    "judged_on": "dev",
}


def point(run: str, value: float, rsum: float | None, **change) -> RowResult:
    one = RowResult(label=[run.title(), f"{value:g}"], value=value, varied_run=run, **change)
    if rsum is None:
        return one
    return one.with_each([SeedResult(seed=0, recipe="r", numbers={"rsum": rsum})])


def results(*rows: RowResult) -> Reproduction:
    return Reproduction(
        name="tiny", kind="sweep", title="t", paper="p", data="scenes", scale="full", seeds=1,
        overrides=[], columns=["Model", "rate"], rows=list(rows), key=SWEEP["key"],
        judged_on="dev",
    )  # fmt: skip


def line(run: str, *scores: float | None, values=(0.001, 0.002, 0.004)) -> list[RowResult]:
    return [point(run, value, score) for value, score in zip(values, scores, strict=True)]


def test_the_best_value_is_at_an_edge_or_inside() -> None:
    assert edge(line("all", 3.0, 2.0, 1.0)) == "below"
    assert edge(line("all", 1.0, 2.0, 3.0)) == "above"
    assert edge(line("all", 1.0, 3.0, 2.0)) is None
    assert edge(line("all", 3.0, 3.0, 1.0)) == "below"  # of equal ones, the smaller is chosen
    assert edge([]) is None


def test_a_value_that_failed_counts_as_tried() -> None:
    rows = line("all", 1.0, 2.0, None)
    assert edge(rows) == "above"  # it was not tried
    failed = point("all", 0.004, None, errors=["the loss is not finite"])
    assert edge([*rows[:2], failed]) is None


@pytest.mark.parametrize(
    ("values", "side", "log", "expected"),
    [
        ([0.002, 0.004, 0.008], "above", True, 0.016),
        ([2e-4, 5e-4, 1e-3], "below", True, 8e-5),
        ([0, 1, 3], "above", False, 5),
        ([0, 1, 3], "below", False, None),
        ([0.0, 0.5], "above", True, 1.0),  # no ratio to zero
    ],
)
def test_the_next_value_keeps_the_step_of_the_grid(values, side, log, expected) -> None:
    found = value_beyond(values, side, log)
    assert found == expected
    assert isinstance(found, type(expected))


def test_only_lines_that_end_at_an_edge_get_one_more_value_and_not_for_ever() -> None:
    sweep = build_artifact(tiny(**SWEEP), "tiny.yaml")
    now = results(*line("all", 1.0, 2.0, 3.0), *line("hard", 1.0, 3.0, 2.0))
    wider = widened(sweep, now)
    assert [one.values for one in wider.lines] == [[0.008], []]
    assert [point.value for point in wider.points] == [
        0.001,
        0.002,
        0.004,
        0.008,
        0.001,
        0.002,
        0.004,
    ]
    assert widened(wider, results(*now.rows, point("all", 0.008, 2.5))) is None
    missing = point("all", 0.008, None, missing=1)
    assert widened(wider, results(*now.rows, missing)) is None  # first finish what is planned
    still = results(*now.rows, point("all", 0.008, 4.0))
    widest = widened(wider, still)
    assert widest.lines[0].values == [0.008, 0.016]
    assert widened(widest, results(*still.rows, point("all", 0.016, 5.0))) is None  # beyond: 2


def test_a_climb_takes_values_of_the_grid_that_were_left_out_then_those_beyond() -> None:
    sweep = build_artifact(tiny(**SWEEP), "tiny.yaml")
    (first, second) = sweep.lines
    tried = line("all", 2.0, 1.0, values=(0.002, 0.004))
    assert next_value(sweep, first, tried) == 0.001
    assert next_value(sweep, first, line("all", 1.0, 2.0, values=(0.001, 0.002))) == 0.004
    assert next_value(sweep, first, line("all", 1.0, 3.0, 2.0)) is None
    assert next_value(sweep, first, line("all", 1.0, values=(0.002,))) is None  # no direction
    inside = [
        *line("all", 3.0, 2.0, values=(0.002, 0.004)),
        point("all", 0.001, None, diverged=True),
    ]
    assert next_value(sweep, first, inside) is None
    assert next_value(sweep, first, line("all", 1.0, 2.0, 3.0)) == 0.008
    wider = with_value(with_value(sweep, "all", 0.008), "all", 0.016)
    assert [one.values for one in wider.lines] == [[0.008, 0.016], []]
    rows = line("all", 1.0, 2.0, values=(0.008, 0.016))
    assert next_value(wider, wider.lines[0], rows) is None  # beyond: 2
    assert next_value(wider, second, line("hard", 1.0, 2.0, 3.0)) == 0.008
    elsewhere = [*line("all", 1.0, 2.0, 3.0), point("all", 0.008, 4.0)]  # tried by another call
    assert next_value(sweep, first, elsewhere) == 0.016
    assert next_value(sweep, first, [*elsewhere, point("all", 0.016, 5.0)]) is None  # beyond: 2


def test_further_values_of_a_stored_sweep_are_planned_again() -> None:
    sweep = build_artifact(tiny(**SWEEP), "tiny.yaml")
    stored = results(*line("all", 1.0, 2.0, 3.0), point("all", 0.008, 2.0))
    assert [one.values for one in with_tried(sweep, stored).lines] == [[0.008], []]
    assert with_tried(sweep, None) == sweep
    other = stored.model_copy(update={"key": "train.batch_size"})
    assert with_tried(sweep, other) == sweep


def test_what_this_call_says_of_a_value_counts_where_nothing_is_stored() -> None:
    failed = point("all", 0.004, None, errors=["diverged"])
    now = results(*line("all", None, None, values=(0.001, 0.002)), failed)
    stored = results(*line("all", 1.0, 2.0, None))
    assert edge(latest(stored, now).rows) is None


def test_lines_at_an_edge_are_named() -> None:
    now = results(*line("all", 1.0, 2.0, 3.0), *line("hard", 1.0, 3.0, 2.0), point("one", 1.0, 1.0))
    assert at_an_edge(now) == {"All": 0.004, "One": 1.0}


def test_beyond_needs_lines_that_are_judged_on_dev() -> None:
    with pytest.raises(ConfigError, match="beyond"):
        build_artifact(tiny(**SWEEP | {"judged_on": "test"}), "tiny.yaml")


@pytest.mark.slow
def test_the_command_goes_on_until_the_best_value_is_inside_or_the_limit(tmp_path, cache) -> None:
    """With rates so small that more is better, two are added; the next call knows them."""
    tree = tiny(**SWEEP | {"lines": SWEEP["lines"][:1], "values": [1e-7, 1e-6]})
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(tree), encoding="utf-8")
    command = ["reproduce", str(recipe), "--seeds", "1", "--out", str(tmp_path / "out")]
    command += ["--store", str(tmp_path / "store"), "--cache", str(cache), "--json"]
    values = []
    for _ in range(2):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        found = Reproduction.model_validate_json(done.stdout)
        assert len(found.rows) == 4 or not at_an_edge(found)
        values.append([row.value for row in found.rows])
    assert len(values[0]) > 2
    assert values[0] == values[1]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == len(values[0])
