"""The pictures of a reproduction: SVG always, PNG where matplotlib is installed."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from counterfoil.errors import MissingExtraError
from counterfoil.evaluation.chart_axes import tick_text
from counterfoil.evaluation.chart_marks import COLOURS
from counterfoil.evaluation.charts import line_chart, save_line_chart_png
from counterfoil.files import write_atomically
from counterfoil.reproduce.artefact import METRICS
from counterfoil.reproduce.examples_chart import sheet_svg
from counterfoil.reproduce.histogram_chart import histogram_grid
from counterfoil.reproduce.map_chart import map_sheets
from counterfoil.reproduce.pair_chart import Pair, pair_chart
from counterfoil.reproduce.panel_chart import Dot, Panel, panel_chart
from counterfoil.reproduce.plane_chart import draw_map, map_chart
from counterfoil.reproduce.point_chart import Mark, Ruler, by_line, point_chart
from counterfoil.reproduce.results import (
    Example,
    Found,
    Measure,
    PointMap,
    Reproduction,
    ShownPanel,
)


class Drawing(Protocol):
    """A picture that draws itself in both formats."""

    def svg(self) -> str: ...

    def draw(self, figure: Any) -> None:
        """Onto a figure of matplotlib."""


@dataclass(frozen=True)
class Chart:
    """A picture before it is drawn in either format."""

    name: str
    kind: Literal["bars", "lines", "panels", "points", "map", "examples", "drawing"]
    title: str
    x_label: str
    y_label: str = ""
    pairs: list[Pair] = field(default_factory=list)
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    groups: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    diagonal: bool = False
    log: bool = False
    joined: bool = True
    drawing: Drawing | None = None


MOST_LINES = 12
"""Of a chart that can still be read; of more there is the table."""


def charts_of(found: Reproduction) -> list[Chart]:
    """What there is to draw; nothing where nothing is finished."""
    maps = [*found.maps, *(found.sheet.maps if found.sheet is not None else [])]
    drawn = [*_plot_charts(found), *map(_map_chart, maps)]
    if found.sheet is not None and found.sheet.examples:
        sheet = Chart("examples", "examples", found.title, "", examples=found.sheet.examples)
        drawn.append(sheet)
    if found.kind in ("examples", "negatives"):
        return drawn
    return _charts_of(found)


def _map_chart(one: PointMap) -> Chart:
    return Chart(
        name=one.name,
        kind="map",
        title=one.title,
        x_label=one.x_label,
        y_label=one.y_label,
        groups=one.groups,
        diagonal=one.diagonal,
    )


def _plot_charts(found: Reproduction) -> list[Chart]:
    """Lines of each plot that has any."""
    return [
        Chart(
            name=re.sub(r"[^a-z0-9]+", "-", plot.metric.lower()).strip("-"),
            kind="lines",
            title=plot.title,
            x_label=plot.x_label,
            y_label=plot.y_label,
            lines={line.name: [(x, y) for x, y, _ in line.points] for line in plot.curves},
            levels=plot.levels,
        )
        for plot in found.plots
        if plot.curves
    ]


def _charts_of(found: Reproduction) -> list[Chart]:
    if found.kind == "curves":
        return _plot_charts(found)
    if found.kind in ("histograms", "maps"):
        return _drawings(found)
    scored = [row for row in found.rows if "rsum" in row.numbers]
    if found.kind == "sweep" and len({row.varied_run for row in scored}) > MOST_LINES:
        return []
    if found.kind == "sweep":
        return _sweep_charts(found)
    if found.kind == "table" and found.measures:
        return _panels(found)
    if found.kind == "table":
        pairs = [_pair(found, row) for row in found.rows]
        shown = scored and "rsum" in found.metrics
        return [Chart("rsum", "bars", found.title, "RSUM", pairs=pairs)] if shown else []
    marks = [
        Mark(
            row.speed.kpps,
            row.numbers["rsum"].mean,
            row.numbers["rsum"].std,
            name=row.name,
        )
        for row in scored
        if row.speed is not None
    ]
    chart = Chart(
        name="speed",
        kind="points",
        title=found.title,
        x_label="thousand pairs scored in a second",
        y_label="RSUM",
        marks=marks,
        log=True,
        joined=False,
    )
    return [chart] if marks else []


def _drawings(found: Reproduction) -> list[Chart]:
    drawings: dict[str, Drawing] = {}
    if found.distributions:
        drawings["distributions"] = histogram_grid(found.title, found.distributions)
    for number, sheet in enumerate(map_sheets(found.pairs), 1):
        drawings[f"pair-{number}"] = sheet
    return [
        Chart(name, "drawing", found.title, "", drawing=drawing)
        for name, drawing in drawings.items()
    ]


def _sweep_charts(found: Reproduction) -> list[Chart]:
    """A plot for each panel, or of RSUM: numbers against the values of the key."""
    rsum = ShownPanel(name="rsum", title=found.title, y_label="RSUM", parts=["rsum"])
    charts = []
    for panel in found.panels or [rsum]:
        totals = [(row, row.total(panel.parts)) for row in found.rows if row.value is not None]
        marks = [
            Mark(row.value, total.mean, total.std, line=", ".join(row.label[:-1]))
            for row, total in totals
            if row.value is not None and total is not None
        ]
        chart = Chart(
            name=panel.name,
            kind="points",
            title=panel.title,
            x_label=found.x_label,
            y_label=panel.y_label,
            marks=marks,
            log=found.log,
        )
        charts += [chart] if marks else []
    return charts


def _panels(found: Reproduction) -> list[Chart]:
    """RSUM, where it is shown, and every measure.

    Rows without a number of ours are left out; so is what one row alone has, as it compares none.
    """
    titles = {"rsum": "RSUM"} if "rsum" in found.metrics else {}
    titles |= {measure.title: measure.title for measure in found.measures}
    rows = [row for row in found.rows if not titles.keys().isdisjoint(row.numbers)]
    panels = [
        Panel(title, [_dot(row.numbers.get(key)) for row in rows]) for key, title in titles.items()
    ]
    compared = [panel for panel in panels if len(panel.found) >= min(2, len(rows))]
    names = [row.name for row in rows]
    chart = Chart("measures", "panels", found.title, "", names=names, panels=compared)
    return [chart] if rows and compared else []


def _dot(number: Measure | None) -> Dot | None:
    return Dot(number.mean, number.std) if number is not None else None


def write_charts(found: Reproduction, folder: Path) -> list[Path]:
    """Write every picture; the names of the SVG files."""
    written = []
    for chart in charts_of(found):
        path = folder / f"{chart.name}.svg"
        write_atomically(path, to_svg(chart))
        written.append(path)
        if chart.kind == "examples":  # pictures and words: the SVG and the page hold them
            continue
        try:
            save_png(chart, path.with_suffix(".png"))
        except MissingExtraError:
            continue
    return written


def to_svg(chart: Chart) -> str:
    if chart.drawing is not None:
        return chart.drawing.svg()
    if chart.kind == "bars":
        return pair_chart(chart.pairs, chart.title, ("our RSUM", "the paper's"))
    if chart.kind == "panels":
        return panel_chart(chart.names, chart.panels, chart.title)
    if chart.kind == "examples":
        return sheet_svg(chart.examples, chart.title)
    if chart.kind == "map":
        return map_chart(
            chart.groups, chart.title, chart.x_label, chart.y_label, diagonal=chart.diagonal
        )
    if chart.kind == "lines":
        return line_chart(
            chart.lines, chart.title, chart.x_label, chart.y_label, levels=chart.levels
        )
    return point_chart(
        chart.marks,
        chart.title,
        chart.x_label,
        chart.y_label,
        log=chart.log,
        joined=chart.joined,
    )


def save_png(chart: Chart, path: Path) -> None:
    """The same picture by matplotlib."""
    if chart.kind == "lines":
        save_line_chart_png(
            path, chart.lines, chart.title, chart.x_label, chart.y_label, levels=chart.levels
        )
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "saving a chart as PNG") from error
    rows = len(chart.pairs) or len(chart.names)
    figure = Figure(figsize=(8, max(3.5, 0.45 * rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if chart.drawing is not None:
        chart.drawing.draw(figure)
    elif chart.kind == "panels":
        _draw_panels(figure, chart)
    else:
        _draw_axes(figure.add_subplot(), chart)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _draw_axes(axes: Any, chart: Chart) -> None:
    if chart.kind == "bars":
        _draw_pairs(axes, chart.pairs)
    elif chart.kind == "map":
        draw_map(axes, chart.groups, chart.diagonal)
    else:
        _draw_marks(axes, chart.marks, chart.log, chart.joined)
    axes.set_title(textwrap.fill(chart.title, 90), loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_panels(figure: Any, chart: Chart) -> None:
    """Lines of up to four panels; the rows are named before the first of each line."""
    across = min(4, len(chart.panels))
    lines = -(-len(chart.panels) // across)
    figure.set_size_inches(4 + 1.8 * across, lines * (1.2 + 0.25 * len(chart.names)))
    figure.suptitle(textwrap.fill(chart.title, 90), fontweight="bold", fontsize=10)
    for number, panel in enumerate(chart.panels):
        axes = figure.add_subplot(lines, across, number + 1)
        for place, dot in enumerate(panel.dots):
            if dot is not None:
                colour = COLOURS[place % len(COLOURS)]
                axes.errorbar(dot.mean, place, xerr=dot.spread or 0.0, fmt="o", color=colour)
        named = number % across == 0
        axes.set_yticks(range(len(chart.names)), chart.names if named else [""] * len(chart.names))
        axes.set_ylim(len(chart.names) - 0.5, -0.5)
        axes.set_title(textwrap.fill(panel.title, 24), loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_marks(axes: Any, marks: Sequence[Mark], log: bool, joined: bool) -> None:
    ruler = Ruler.over([mark.x for mark in marks], log, at_values=joined)
    for number, (name, of_line) in enumerate(by_line(marks).items()):
        axes.errorbar(
            [ruler.at(mark.x) for mark in of_line],
            [mark.y for mark in of_line],
            [mark.spread or 0.0 for mark in of_line],
            fmt="o-" if joined else "o",
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    if any(mark.line for mark in marks):
        axes.legend(frameon=False)
    for mark in marks:
        axes.annotate(
            mark.name, (ruler.at(mark.x), mark.y), xytext=(6, -3), textcoords="offset points"
        )
    axes.set_xticks(
        [ruler.at(tick) for tick in ruler.ticks], [tick_text(tick) for tick in ruler.ticks]
    )


def _pair(found: Reproduction, row: Found) -> Pair:
    """RSUM of a row, ours beside the paper's."""
    ours = row.numbers.get("rsum")
    numbers = row.published.get(found.published_on or "", [])
    total = numbers[METRICS.index("rsum")] if numbers else None
    return Pair(row.name, ours.mean if ours else None, ours.std if ours else None, total)


def _draw_pairs(axes: Any, pairs: Sequence[Pair]) -> None:
    places = range(len(pairs))
    ours, spread = [pair.ours or 0.0 for pair in pairs], [pair.spread or 0.0 for pair in pairs]
    theirs = [pair.published or 0.0 for pair in pairs]
    axes.barh([y - 0.2 for y in places], ours, 0.4, xerr=spread, color=COLOURS[0], label="ours")
    if any(theirs):
        axes.barh([y + 0.2 for y in places], theirs, 0.4, color=COLOURS[1], label="the paper's")
    axes.set_yticks(list(places), [pair.name for pair in pairs])
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
