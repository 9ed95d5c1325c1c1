"""Charts of a reproduction, as SVG and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from counterfoil.plots.charts import Point, line_chart, save_figure
from counterfoil.plots.comparison import (
    Dot,
    Mark,
    Pair,
    Panel,
    TradeOff,
    pair_chart,
    panel_chart,
    point_chart,
    trade_off_chart,
)
from counterfoil.plots.maps import (
    DensityPanel,
    SheetExample,
    SheetWord,
    WordMaps,
    density_grid,
    example_sheet,
    plane_chart,
    word_maps,
)
from counterfoil.reproduce.artifact import METRICS
from counterfoil.reproduce.distributions import describe_samples
from counterfoil.reproduce.results import (
    Curve,
    Distribution,
    Example,
    MappedPair,
    PointMap,
    Reproduction,
    RowResult,
    ShownPanel,
)
from counterfoil.reproduce.spread import Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A chart with the name of its file; ``draw`` creates the figure."""

    name: str
    draw: Callable[[], Figure]


MAX_LINES = 12
"""Most lines of a readable chart; sweeps with more have only a table."""


def charts_of(result: Reproduction) -> list[Chart]:
    """The charts of a reproduction; empty if nothing is finished."""
    if result.kind == "curves":
        return _plot_charts(result)
    if result.kind in ("examples", "negatives"):
        maps = [*result.maps, *(result.sheet.maps if result.sheet is not None else [])]
        charts = [*_plot_charts(result), *map(_map_chart, maps)]
        if result.sheet is not None and result.sheet.examples:
            examples = [_shown_example(example) for example in result.sheet.examples]
            charts.append(Chart("examples", partial(example_sheet, result.title, examples)))
        return charts
    if result.kind == "histograms":
        grid = partial(_density_grid, result)
        return [Chart("distributions", grid)] if result.distributions else []
    if result.kind == "maps":
        return _word_charts(result)
    if result.kind == "sweep":
        return _sweep_charts(result)
    if result.kind == "table":
        return [*_panels(result), *_trade_off(result)] if result.measures else _bars(result)
    return _speeds(result)


def write_charts(result: Reproduction, folder: Path) -> list[Path]:
    """Write every chart as SVG and PNG; returns the paths of the SVG files."""
    written = []
    for chart in charts_of(result):
        figure = chart.draw()
        written.append(save_figure(figure, folder / f"{chart.name}.svg"))
        save_figure(figure, folder / f"{chart.name}.png")
    return written


def _map_chart(one: PointMap) -> Chart:
    labels = one.title, one.x_label, one.y_label
    return Chart(one.name, partial(plane_chart, one.groups, *labels, diagonal=one.diagonal))


def _plot_charts(result: Reproduction) -> list[Chart]:
    """One line chart per plot with curves."""
    return [
        Chart(
            re.sub(r"[^a-z0-9]+", "-", plot.metric.lower()).strip("-"),
            partial(
                line_chart,
                _named_lines(plot.curves),
                plot.title,
                plot.x_label,
                plot.y_label,
                levels=plot.levels,
            ),
        )
        for plot in result.plots
        if plot.curves
    ]


def _named_lines(curves: list[Curve]) -> dict[str, list[Point]]:
    """Points by name; a name of several curves is prefixed with that of the curve before it."""
    lines: dict[str, list[Point]] = {}
    shared = {name for name in (c.name for c in curves) if [c.name for c in curves].count(name) > 1}
    before = ""
    for curve in curves:
        name = f"{before}: {curve.name}" if curve.name in shared else curve.name
        lines[name] = list(curve.points)
        before = curve.name
    return lines


def _bars(result: Reproduction) -> list[Chart]:
    """RSUM of a table: ours and the published one."""
    if "rsum" not in result.metrics or not any("rsum" in row.numbers for row in result.rows):
        return []
    pairs = [_pair(result, row) for row in result.rows]
    return [Chart("rsum", partial(pair_chart, pairs, result.title, ("our RSUM", "the paper's")))]


def _pair(result: Reproduction, row: RowResult) -> Pair:
    ours = row.numbers.get("rsum")
    numbers = row.published.get(result.published_on or "", [])
    total = numbers[METRICS.index("rsum")] if numbers else None
    return Pair(row.name, ours.mean if ours else None, ours.std if ours else None, total)


def _panels(result: Reproduction) -> list[Chart]:
    """One panel for RSUM, if it is shown, and one per measure.

    Rows without numbers of our runs are left out, and panels with only one row.
    """
    titles = {"rsum": "RSUM"} if "rsum" in result.metrics else {}
    titles |= {measure.title: measure.title for measure in result.measures}
    rows = [row for row in result.rows if not titles.keys().isdisjoint(row.numbers)]
    panels = [
        Panel(title, [_dot(row.numbers.get(key)) for row in rows])
        for key, title in titles.items()
        if sum(key in row.numbers for row in rows) >= min(2, len(rows))
    ]
    names = [row.name for row in rows]
    chart = Chart("measures", partial(panel_chart, names, panels, result.title))
    return [chart] if rows and panels else []


def _trade_off(result: Reproduction) -> list[Chart]:
    """Foils against RSUM, from the first row to each other one; not with fewer than two rows."""
    rows = [row for row in result.rows if _both(row, result.trade_off)]
    if len(rows) < 2 or not result.trade_off:
        return []
    start = _both(rows[0], result.trade_off)
    points = []
    for row in rows:
        both, name = _both(row, result.trade_off), row.label[: -1 if result.varied else None]
        rsum, foils = (Measure.over([each[side] for each in both.values()]) for side in (0, 1))
        spreads = (
            (_spread_of_change(both, start, side) for side in (0, 1)) if row != rows[0] else ()
        )
        title = ", ".join(part for part in name if part != "–")
        points.append(TradeOff(title, rsum.mean, foils.mean, *spreads))
    return [Chart("trade-off", partial(trade_off_chart, points, result.title))]


def _both(row: RowResult, foils: Sequence[str]) -> dict[int, tuple[float, float]]:
    """RSUM and the mean of the measures on foils, by seed."""
    return {
        one.seed: (one.numbers["rsum"], fmean(one.numbers[title] for title in foils))
        for one in row.each
        if foils and {"rsum", *foils} <= one.numbers.keys()
    }


def _spread_of_change(
    both: Mapping[int, tuple[float, float]], start: Mapping[int, tuple[float, float]], side: int
) -> float | None:
    """Deviation over seeds of the change since the start, which all rows of a seed share."""
    changes = [both[seed][side] - start[seed][side] for seed in both.keys() & start.keys()]
    return Measure.over(changes).std if changes else None


def _dot(number: Measure | None) -> Dot | None:
    return Dot(number.mean, number.std) if number is not None else None


def _sweep_charts(result: Reproduction) -> list[Chart]:
    """One plot per panel, or one of RSUM, against the values of the key."""
    if len({row.varied_run for row in result.rows if "rsum" in row.numbers}) > MAX_LINES:
        return []
    rsum = ShownPanel(name="rsum", title=result.title, y_label="RSUM", parts=["rsum"])
    charts = []
    for panel in result.panels or [rsum]:
        totals = [(row, row.total(panel.parts)) for row in result.rows]
        marks = [
            Mark(row.value, total.mean, total.std, line=", ".join(row.label[:-1]))
            for row, total in totals
            if row.value is not None and total is not None
        ]
        labels = panel.title, result.x_label, panel.y_label
        draw = partial(point_chart, marks, *labels, log=result.log)
        charts += [Chart(panel.name, draw)] if marks else []
    return charts


def _speeds(result: Reproduction) -> list[Chart]:
    """RSUM against speed."""
    marks = [
        Mark(row.speed.kpps, row.numbers["rsum"].mean, row.numbers["rsum"].std, name=row.name)
        for row in result.rows
        if row.speed is not None and "rsum" in row.numbers
    ]
    labels = result.title, "thousand pairs scored per second", "RSUM"
    draw = partial(point_chart, marks, *labels, log=True, joined=False)
    return [Chart("speed", draw)] if marks else []


def _density_grid(result: Reproduction) -> Figure:
    """One line per row, one column per epoch that any row shows."""
    rows = dict.fromkeys(one.row for one in result.distributions)
    columns = dict.fromkeys(one.when for one in result.distributions)
    panels = {(one.row, one.when): _density_panel(one) for one in result.distributions}
    lines = [[panels.get((row, when)) for when in columns] for row in rows]
    return density_grid(result.title, lines)


def _density_panel(one: Distribution) -> DensityPanel:
    drawn = describe_samples(one.model_dump())  # of the drawn seed, not over all seeds
    errors = {"matched_below": "matched below", "mismatched_above": "mismatched above"}
    shares = [f"{drawn[key]:.1f} % {text}" for key, text in errors.items() if key in drawn]
    alpha = "" if one.alpha is None else f", α = {one.alpha:g}"
    boundary = f"t = {one.boundary:.3f}{alpha}"
    lines = (f"{one.row}: epoch {one.epoch} ({one.when})", boundary, ", ".join(shares))
    counts = {"matched": one.matched, "mismatched": one.mismatched}
    counts = {kind: bins for kind, bins in counts.items() if any(bins)}
    normals = {kind: (drawn[f"{kind}_mean"], max(drawn[f"{kind}_std"], 1e-3)) for kind in counts}
    return DensityPanel("\n".join(lines), one.low, one.high, counts, normals, one.boundary)


def _word_charts(result: Reproduction) -> list[Chart]:
    """One sheet of maps per caption: with its own image, then with wrong ones."""
    sheets: list[list[MappedPair]] = []
    for pair in result.pairs:
        if not sheets or pair.own or pair.caption != sheets[-1][0].caption:
            sheets.append([])
        sheets[-1].append(pair)
    return [
        Chart(
            f"pair-{number}",
            partial(word_maps, f"“{pairs[0].caption}”", [_word_maps(pair) for pair in pairs]),
        )
        for number, pairs in enumerate(sheets, 1)
    ]


def _word_maps(pair: MappedPair) -> WordMaps:
    heading = f"with {'its own' if pair.own else 'a wrong'} image, {pair.image}"
    titles = [f"{one.row}: {one.quantity}, score {one.score:.3f}" for one in pair.maps]
    maps = list(zip(titles, (one.values for one in pair.maps), strict=True))
    return WordMaps(heading, pair.words, pair.regions, maps)


def _shown_example(example: Example) -> SheetExample:
    sentences = []
    for line in example.lines:
        scores = ", ".join(f"{name} {score:.3f}" for name, score in line.scores.items())
        words = [SheetWord(word.text, word.new, word.wrong) for word in line.words]
        sentences.append((f"{line.kind}: {scores}", words))
    return SheetExample(example.image, example.picture, sentences)
