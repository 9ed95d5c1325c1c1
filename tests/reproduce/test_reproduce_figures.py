"""Figures of the papers: plateaus of losses, panels of sweeps, and every entry by its command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.config import RunConfig
from counterfoil.core.errors import ConfigError
from counterfoil.reproduce.artifact import Sweep
from counterfoil.reproduce.catalogue import load_artifact, names
from counterfoil.reproduce.collect import per_pair
from counterfoil.reproduce.plan import Settings, make_plan
from counterfoil.reproduce.plots import charts_of
from counterfoil.reproduce.present import to_markdown, write_reproduction
from counterfoil.reproduce.results import Reproduction, SeedResult
from counterfoil.reproduce.spec import Curves, build_artifact
from counterfoil.reproduce.spread import Measure
from tests.reproduce.conftest import TINY, planned, tiny
from tests.reproduce.test_reproduce import finish

LOSS = {"metric": "loss", "title": "Loss", "y_label": "of a pair", "per_pair": True}
SWEEP = {
    "kind": "sweep", "rows": None, "columns": None, "key": "objective.hardest.margin",
    "values": [0.1, 0.2], "x_label": "margin", "log": False,
    "lines": [{"label": "hard", "run": "hard", "published": {"f30k": [10.0, None]}}],
    "panels": [
        {"metric": "i2t", "title": "There", "y_label": "sum"},
        {"metric": "t2i_r5", "title": "Back"},
    ],
}  # fmt: skip
SMALLEST = [
    "data.options.images=[24,8,12]", "data.min_count=1", "model.embed_size=16", "train.epochs=1",
    "train.batch_size=12", "train.device=cpu", "train.log_every=1", "evaluation.bootstrap=0",
]  # fmt: skip
ENTRIES = {
    "selhn.figure1": ["loss", "dev-rsum"],
    "selhn.figure6": ["i2t", "t2i"],
    "ndgl.table2": ["rsum"],
    "ndgl.figure1b": ["map"],
    "ndgl.figure1c": ["similarity"],
    "ndgl.figure3b": ["margin-i2t", "margin-t2i"],
    "tags.figure1": ["scores", "examples"],
    "tags.figure3": ["examples"],
    "tags.truth": ["measures"],
}
FAST = ("ndgl.figure1b",)


@pytest.mark.parametrize("weight", [1.0, 2.0])
@pytest.mark.parametrize(("reduction", "size"), [("sum", 8), ("sum", 128), ("mean", 8)])
def test_a_loss_per_pair_is_twice_the_margin_while_all_scores_are_equal(
    weight, reduction, size
) -> None:
    import torch

    from counterfoil.objectives import create_objective
    from counterfoil.objectives.base import Context

    term = {"weight": weight, "margin": 0.3, "reduction": reduction}
    config = RunConfig.model_validate(
        {"objective": {"hardest": term}, "train": {"batch_size": size, "epochs": 3}}
    )
    scores = torch.full((size, size), 0.7)
    report = create_objective(config.objective).compute(
        scores, torch.eye(size, dtype=bool), Context()
    )
    assert float(report.loss) * per_pair(config) == pytest.approx(0.6, rel=1e-5)


def test_a_loss_without_a_level_is_refused_where_one_pair_is_asked_for() -> None:
    config = RunConfig.model_validate({"objective": {"infonce": {}}})
    with pytest.raises(ConfigError, match="infonce has no level"):
        per_pair(config)
    with pytest.raises(ConfigError, match="per_pair is for the metric 'loss'"):
        build_artifact(tiny(kind="curves", panels=[LOSS | {"metric": "dev.rsum"}]), "x.yaml")


def test_the_plateau_of_a_loss_is_drawn_as_a_level(out, cache, tmp_path) -> None:
    figure = tiny(kind="curves", panels=[LOSS], rows=[TINY["rows"][1]])
    result = finish(planned(figure, out), cache)
    (plot,) = result.plots
    assert list(plot.levels.values()) == [0.4]
    logged = finish(planned(figure | {"panels": [LOSS | {"per_pair": False}]}, out), cache)
    scaled = [y for _, y, _ in plot.curves[0].points]
    assert scaled == pytest.approx([y / 24 for _, y, _ in logged.plots[0].curves[0].points])
    write_reproduction(result, tmp_path)
    assert "2 × margin (0.2): all scores equal" in (tmp_path / "loss.svg").read_text()
    for one, levels in ((result, [0.4]), (logged, [])):
        lines = charts_of(one)[0].draw().axes[0].get_lines()
        assert [line.get_ydata()[0] for line in lines if line.get_linestyle() == "--"] == levels


@pytest.mark.slow
def test_a_sweep_has_a_plot_for_each_of_its_panels(out, cache, tmp_path) -> None:
    result = finish(planned(tiny(**SWEEP), out, seeds=2), cache)
    there, back = charts_of(result)
    (line,), (other,) = (chart.draw().axes[0].containers for chart in (there, back))
    assert [chart.name for chart in (there, back)] == ["i2t", "t2i_r5"]
    assert [chart.draw().get_suptitle() for chart in (there, back)] == ["There", "Back"]
    points = zip(line.lines[0].get_ydata(), line.lines[2][0].get_segments(), strict=True)
    for (y, bar), row in zip(points, result.rows, strict=True):
        sums = [sum(one.numbers[f"i2t_r{k}"] for k in (1, 5, 10)) for one in row.each]
        assert y == pytest.approx(Measure.over(sums).mean)
        assert bar[1, 1] - y == pytest.approx(Measure.over(sums).std)
    expected = [row.numbers["t2i_r5"].mean for row in result.rows]
    assert other.lines[0].get_ydata().tolist() == expected
    write_reproduction(result, tmp_path)
    assert {"i2t.svg", "i2t.png", "t2i_r5.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "(10.0)" in to_markdown(result)


def test_a_sum_over_seeds_leaves_out_seeds_that_lack_a_part(out) -> None:
    plan = planned(tiny(**SWEEP), out)
    from counterfoil.reproduce.results import table_rows

    row = table_rows(plan)[0].result
    whole = SeedResult(seed=0, recipe="r", numbers={"i2t_r1": 1.0, "i2t_r5": 2.0})
    part = SeedResult(seed=1, recipe="r", numbers={"i2t_r1": 5.0})
    row = row.with_each([whole, part])
    assert row.total(["i2t_r1", "i2t_r5"]) == Measure(mean=3.0, seeds=1)
    assert row.total(["t2i_r1"]) is None


def test_an_unknown_metric_of_a_panel_is_named() -> None:
    panels = [{"metric": "t2i_r50", "title": "x"}]
    with pytest.raises(ConfigError, match="unknown metric 't2i_r50'; did you mean 't2i_r5'"):
        build_artifact(tiny(**SWEEP | {"panels": panels}), "x.yaml")


def test_figure_1_of_selhn_has_hardest_negatives_from_the_start_in_three_models(tmp_path) -> None:
    artifact = load_artifact("selhn.figure1")
    assert isinstance(artifact, Curves)
    assert [row.name for row in artifact.rows] == ["VSE++", "SCAN", "SGRAF"]
    for data in ("scenes", "f30k_precomp"):
        plan = make_plan(artifact, Settings(data, "f30k"), tmp_path)
        configs = [runs[0].config for runs in plan.runs.values()]
        assert [config.model.name for config in configs] == ["vse++", "scan-t2i", "sgraf"]
        for config in configs:
            assert config.objective == {"hardest": {"margin": 0.2}}
            per_pair(config)
    table7 = make_plan(load_artifact("selhn.table7"), Settings(), tmp_path)
    shared = make_plan(artifact, Settings(), tmp_path).runs["scan-t2i-hn"][0].digest
    assert shared in {run.digest for run in table7.in_order()}


def test_figure_6_of_selhn_has_a_panel_for_each_direction_and_both_models() -> None:
    artifact = load_artifact("selhn.figure6")
    assert isinstance(artifact, Sweep)
    assert [panel.metric for panel in artifact.panels] == ["i2t", "t2i"]
    assert [line.run for line in artifact.lines] == ["rvse-mlp-selhn", "rvse++"]


def test_table_2_of_ndgl_runs_both_rows_of_chan_and_quotes_the_others() -> None:
    table = load_artifact("ndgl.table2")
    assert len(table.rows) == 18
    assert [row.run for row in table.rows if row.run] == ["chan-ndgl", "chan-bert-ndgl"]
    assert all({"f30k", "coco-1k"} == row.published.keys() for row in table.rows)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ENTRIES]
)
def test_an_entry_runs_by_its_command_and_the_second_call_trains_nothing(
    name, cache, tmp_path_factory
) -> None:
    shared = Path(tmp_path_factory.getbasetemp()) / "entries"
    call = ["reproduce", name, *SMALLEST, "--seeds", "1", "--out", str(shared)]
    call += ["--cache", str(cache)]
    first = CliRunner().invoke(app, call)
    assert first.exit_code == 0, (first.output, first.exception)
    again = CliRunner().invoke(app, call)
    assert again.exit_code == 0
    assert again.stdout == first.stdout
    (folder,) = shared.glob(f"{name}-scenes-*")
    result = Reproduction.from_json((folder / f"{name}.json").read_text())
    assert result.complete
    assert [chart.name for chart in charts_of(result)] == ENTRIES[name]
    plan = make_plan(load_artifact(name), Settings(seeds=1, overrides=tuple(SMALLEST)), shared)
    assert plan.missing() == []


def test_all_entries_have_names_in_the_list() -> None:
    assert set(ENTRIES) <= set(names())
    order = [name for name in names() if name.startswith("ndgl.figure")]
    assert order == [f"ndgl.figure{end}" for end in ("1b", "1c", "3", "3b", "4")]
