"""The pictures of a reproduction, as SVG and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from counterfoil.plots.charts import Point, line_chart, save_figure
from counterfoil.plots.comparison import (
    Dot,
    Mark,
    Pair,
    Panel,
    pair_chart,
    panel_chart,
    point_chart,
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
    Measure,
    PointMap,
    Reproduction,
    RowResult,
    ShownPanel,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A picture by the name of its file; its figure is made when it is asked for."""

    name: str
    draw: Callable[[], Figure]


MAX_LINES = 12
"""Of a chart that can still be read; of more there is the table."""


def charts_of(found: Reproduction) -> list[Chart]:
    """What there is to draw; nothing where nothing is finished."""
    if found.kind == "curves":
        return _plot_charts(found)
    if found.kind in ("examples", "negatives"):
        maps = [*found.maps, *(found.sheet.maps if found.sheet is not None else [])]
        charts = [*_plot_charts(found), *map(_map_chart, maps)]
        if found.sheet is not None and found.sheet.examples:
            examples = [_shown(example) for example in found.sheet.examples]
            charts.append(Chart("examples", partial(example_sheet, found.title, examples)))
        return charts
    if found.kind == "histograms":
        grid = partial(_density_grid, found)
        return [Chart("distributions", grid)] if found.distributions else []
    if found.kind == "maps":
        return _word_charts(found)
    if found.kind == "sweep":
        return _sweep_charts(found)
    if found.kind == "table":
        return _panels(found) if found.measures else _bars(found)
    return _speeds(found)


def write_charts(found: Reproduction, folder: Path) -> list[Path]:
    """Write every picture as SVG and PNG; the names of the SVG files."""
    written = []
    for chart in charts_of(found):
        figure = chart.draw()
        written.append(save_figure(figure, folder / f"{chart.name}.svg"))
        save_figure(figure, folder / f"{chart.name}.png")
    return written


def _map_chart(one: PointMap) -> Chart:
    labels = one.title, one.x_label, one.y_label
    return Chart(one.name, partial(plane_chart, one.groups, *labels, diagonal=one.diagonal))


def _plot_charts(found: Reproduction) -> list[Chart]:
    """Lines of each plot that has any."""
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
        for plot in found.plots
        if plot.curves
    ]


def _named_lines(curves: list[Curve]) -> dict[str, list[Point]]:
    """Points by name; a name that several lines share also says which line it follows."""
    lines: dict[str, list[Point]] = {}
    shared = {name for name in (c.name for c in curves) if [c.name for c in curves].count(name) > 1}
    before = ""
    for curve in curves:
        name = f"{before}: {curve.name}" if curve.name in shared else curve.name
        lines[name] = list(curve.points)
        before = curve.name
    return lines


def _bars(found: Reproduction) -> list[Chart]:
    """RSUM of a table, ours beside the paper's."""
    if "rsum" not in found.metrics or not any("rsum" in row.numbers for row in found.rows):
        return []
    pairs = [_pair(found, row) for row in found.rows]
    return [Chart("rsum", partial(pair_chart, pairs, found.title, ("our RSUM", "the paper's")))]


def _pair(found: Reproduction, row: RowResult) -> Pair:
    ours = row.numbers.get("rsum")
    numbers = row.published.get(found.published_on or "", [])
    total = numbers[METRICS.index("rsum")] if numbers else None
    return Pair(row.name, ours.mean if ours else None, ours.std if ours else None, total)


def _panels(found: Reproduction) -> list[Chart]:
    """RSUM, where it is shown, and every measure.

    Rows without a number of ours are left out; so is what one row alone has, as it compares none.
    """
    titles = {"rsum": "RSUM"} if "rsum" in found.metrics else {}
    titles |= {measure.title: measure.title for measure in found.measures}
    rows = [row for row in found.rows if not titles.keys().isdisjoint(row.numbers)]
    panels = [
        Panel(title, [_dot(row.numbers.get(key)) for row in rows])
        for key, title in titles.items()
        if sum(key in row.numbers for row in rows) >= min(2, len(rows))
    ]
    names = [row.name for row in rows]
    chart = Chart("measures", partial(panel_chart, names, panels, found.title))
    return [chart] if rows and panels else []


def _dot(number: Measure | None) -> Dot | None:
    return Dot(number.mean, number.std) if number is not None else None


def _sweep_charts(found: Reproduction) -> list[Chart]:
    """A plot for each panel, or of RSUM: numbers against the values of the key."""
    if len({row.varied_run for row in found.rows if "rsum" in row.numbers}) > MAX_LINES:
        return []
    rsum = ShownPanel(name="rsum", title=found.title, y_label="RSUM", parts=["rsum"])
    charts = []
    for panel in found.panels or [rsum]:
        totals = [(row, row.total(panel.parts)) for row in found.rows]
        marks = [
            Mark(row.value, total.mean, total.std, line=", ".join(row.label[:-1]))
            for row, total in totals
            if row.value is not None and total is not None
        ]
        labels = panel.title, found.x_label, panel.y_label
        draw = partial(point_chart, marks, *labels, log=found.log)
        charts += [Chart(panel.name, draw)] if marks else []
    return charts


def _speeds(found: Reproduction) -> list[Chart]:
    """RSUM against speed."""
    marks = [
        Mark(row.speed.kpps, row.numbers["rsum"].mean, row.numbers["rsum"].std, name=row.name)
        for row in found.rows
        if row.speed is not None and "rsum" in row.numbers
    ]
    labels = found.title, "thousand pairs scored in a second", "RSUM"
    draw = partial(point_chart, marks, *labels, log=True, joined=False)
    return [Chart("speed", draw)] if marks else []


def _density_grid(found: Reproduction) -> Figure:
    """A line for each row, a column for each epoch that any row shows."""
    rows = dict.fromkeys(one.row for one in found.distributions)
    columns = dict.fromkeys(one.when for one in found.distributions)
    by_place = {(one.row, one.when): _density_panel(one) for one in found.distributions}
    lines = [[by_place.get((row, when)) for when in columns] for row in rows]
    return density_grid(found.title, lines)


def _density_panel(one: Distribution) -> DensityPanel:
    drawn = describe_samples(one.model_dump())  # of the seed that is drawn, not over all seeds
    errors = {"matched_below": "matched below", "mismatched_above": "mismatched above"}
    shares = [f"{drawn[key]:.1f} % {text}" for key, text in errors.items() if key in drawn]
    alpha = "" if one.alpha is None else f", α = {one.alpha:g}"
    boundary = f"t = {one.boundary:.3f}{alpha}"
    lines = (f"{one.row}: epoch {one.epoch} ({one.when})", boundary, ", ".join(shares))
    counts = {"matched": one.matched, "mismatched": one.mismatched}
    counts = {kind: some for kind, some in counts.items() if any(some)}
    normals = {kind: (drawn[f"{kind}_mean"], max(drawn[f"{kind}_std"], 1e-3)) for kind in counts}
    return DensityPanel("\n".join(lines), one.low, one.high, counts, normals, one.boundary)


def _word_charts(found: Reproduction) -> list[Chart]:
    """A sheet of maps for each caption: with its own image, then with wrong ones."""
    sheets: list[list[MappedPair]] = []
    for pair in found.pairs:
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


def _shown(example: Example) -> SheetExample:
    sentences = []
    for line in example.lines:
        scores = ", ".join(f"{name} {score:.3f}" for name, score in line.scores.items())
        words = [SheetWord(word.text, word.new, word.wrong) for word in line.words]
        sentences.append((f"{line.kind}: {scores}", words))
    return SheetExample(example.image, example.picture, sentences)
