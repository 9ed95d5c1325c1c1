"""Charts that compare rows of a table: with published values, per metric, or as points."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterfoil.plots.charts import (
    COLORS,
    INK,
    add_legend,
    color,
    label_width,
    line_style,
    name_rows,
    new_axes,
    new_figure,
    place_axes,
    short,
    show_no_data,
    styled,
    title_height,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED_POINTS = 6
"""Names at the points of a plot overlap when there are more."""
MARKERS = ("o", "s", "^")
"""By turns, each with all colors."""


@dataclass(frozen=True)
class Pair:
    """A row: the measured value, its deviation over seeds, and the published value."""

    name: str
    ours: float | None
    spread: float | None
    published: float | None


@dataclass(frozen=True)
class Dot:
    """A mean over seeds and its deviation."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Panel:
    """One metric: its name and one dot per row, None if the row has no value."""

    title: str
    dots: Sequence[Dot | None]


@dataclass(frozen=True)
class Mark:
    """One point: its position, the deviation of y, its name and its line."""

    x: float
    y: float
    spread: float | None = None
    name: str = ""
    line: str = ""


@dataclass(frozen=True)
class TradeOff:
    """A model by its retrieval (RSUM) and its share of true captions above foils, in percent.

    Spreads are deviations over seeds.
    """

    name: str
    retrieval: float
    foils: float
    retrieval_spread: float | None = None
    foils_spread: float | None = None


@styled
def pair_chart(
    pairs: Sequence[Pair], title: str = "", names: tuple[str, str] = ("ours", "the paper's")
) -> Figure:
    """Two bars per row, ours above the paper's, each with its value.

    >>> pairs = [Pair("HN", 480.0, 2.0, 484.6), Pair("NAAF", None, None, 513.2)]
    >>> [float(bar.get_width()) for bar in pair_chart(pairs).axes[0].patches]
    [480.0, 484.6, 513.2]
    """
    size = 8.0, 1.1 + 0.42 * max(2, len(pairs))
    figure, axes, columns = new_axes(
        title, "", "", names, size, label_width([pair.name for pair in pairs])
    )
    sides = {names[0]: [pair.ours for pair in pairs], names[1]: [pair.published for pair in pairs]}
    for side, (name, values) in enumerate(sides.items()):
        known = {row: value for row, value in enumerate(values) if value is not None}
        if not known:
            continue
        rows = [row + 0.38 * side - 0.19 for row in known]
        axes.barh(rows, list(known.values()), 0.36, color=COLORS[side], label=name)
        for y, (row, value) in zip(rows, known.items(), strict=True):
            spread = (pairs[row].spread or 0.0) if side == 0 else 0.0
            if spread:
                axes.errorbar(value, y, xerr=spread, ecolor=INK, capsize=2)
            axes.annotate(
                f"{value:.1f}",
                (value + spread, y),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    if not axes.patches:
        show_no_data(axes)
        return figure
    name_rows(axes, [pair.name for pair in pairs])
    axes.margins(x=0.1)
    add_legend(axes, columns)
    return figure


@styled
def panel_chart(names: Sequence[str], panels: Sequence[Panel], title: str = "") -> Figure:
    """One dot with its deviation per row and panel; each panel has its own x range.

    Bars from zero would hide the small differences between rows.
    """
    across = max(1, min(4, len(panels)))
    left, line = label_width(names), 0.24 * len(names)
    width = max(6.0, left + 1.8 * across)
    heads = [textwrap.wrap(panel.title, 24) for panel in panels]
    rows = range(0, len(panels), across)
    tops = [0.1 + 0.16 * max(map(len, heads[row : row + across])) for row in rows]
    top = title_height(title, width)
    figure = new_figure(title, width, top + sum(tops) + len(rows) * (line + 0.35) + 0.1)
    if not any(dot for panel in panels for dot in panel.dots):
        show_no_data(place_axes(figure, 0, 0, width, 1.0))
        return figure
    for number, (panel, head) in enumerate(zip(panels, heads, strict=True)):
        row, column = divmod(number, across)
        down = top + sum(tops[: row + 1]) + row * (line + 0.35)
        axes = place_axes(figure, left + 1.8 * column, down, 1.6, line)
        _draw_panel(axes, panel, names if column == 0 else [""] * len(names))
        axes.set_title("\n".join(head))
    return figure


def _draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    name_rows(axes, names)
    for row, dot in enumerate(panel.dots):
        if dot is not None:
            spread = dot.spread or None
            axes.errorbar(dot.mean, row, xerr=spread, fmt="o", color=color(row), markersize=5)
    axes.locator_params(axis="x", nbins=4)
    axes.margins(x=0.12)


@styled
def point_chart(
    marks: Sequence[Mark],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    log: bool = False,
    joined: bool = True,
) -> Figure:
    """Points with their deviations, joined into lines or each with its name.

    A logarithmic axis is linear below the smallest positive value, so that it can show zero.
    """
    lines: dict[str, list[Mark]] = {}
    for mark in sorted(marks, key=lambda mark: mark.x):
        lines.setdefault(mark.line, []).append(mark)
    order = list(dict.fromkeys(mark.line for mark in marks))
    names = order if any(order) else []
    figure, axes, columns = new_axes(title, x_label, y_label, names)
    if not marks:
        show_no_data(axes)
        return figure
    _scale_x(axes, sorted({mark.x for mark in marks}), log, joined)
    for index, name in enumerate(order):
        of_line = lines[name]
        colors = [color(index)] if joined else [color(row) for row in range(len(of_line))]
        parts = [of_line] if joined else [[mark] for mark in of_line]
        for own, part in zip(colors, parts, strict=True):
            axes.errorbar(
                [mark.x for mark in part],
                [mark.y for mark in part],
                [mark.spread or 0.0 for mark in part],
                fmt=f"o{line_style(index)}",
                capsize=2,
                color=own,
                label=short(name),
            )
    axes.margins(x=0.06 if joined else 0.12, y=0.1)
    _name_points(axes, marks)
    if names:
        add_legend(axes, columns)
    return figure


def _scale_x(axes: Axes, values: Sequence[float], log: bool, at_values: bool) -> None:
    """A linear or logarithmic axis with ticks at the values if they are few, else at round ones."""
    positive = [value for value in values if value > 0]
    ticks = list(values) if at_values and len(values) <= 8 else []
    if log and positive:
        axes.set_xscale("symlog", linthresh=positive[0])
        first, last = math.floor(math.log10(positive[0])), math.ceil(math.log10(positive[-1]))
        ticks = ticks or [10.0**power for power in range(first, last + 1)]
        axes.minorticks_off()
    if ticks:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(visible=True, axis="x")


def _name_points(axes: Axes, marks: Sequence[Mark]) -> None:
    """Names beside their points, on the side with more space."""
    low, high = axes.get_xlim()
    middle = sum(axes.transData.transform([(low, 0.0), (high, 0.0)])[:, 0]) / 2
    for mark in marks:
        right = axes.transData.transform((mark.x, mark.y))[0] > middle
        axes.annotate(
            short(mark.name),
            (mark.x, mark.y),
            xytext=(-7 if right else 7, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
        )


@styled
def trade_off_chart(points: Sequence[TradeOff], title: str = "") -> Figure:
    """Foils against retrieval: the first point is the start, with an arrow to each other one.

    Points of the same name are one model trained in several ways: a line joins them instead. Many
    names are listed above the plot, few stand at their points.
    """
    lines: dict[str, list[TradeOff]] = {}
    for point in points:
        lines.setdefault(point.name, []).append(point)
    listed = list(lines) if len(lines) > MAX_NAMED_POINTS else []
    figure, axes, columns = new_axes(title, "RSUM (retrieval)", "true caption > foil, %", listed)
    if not points:
        show_no_data(axes)
        return figure
    for index, line in enumerate(lines.values()):
        _trade_off_line(axes, points[0], line, index)
    axes.margins(x=0.15, y=0.15)
    axes.grid(visible=True)
    if listed:
        add_legend(axes, columns)
    else:
        last = [line[-1] for line in lines.values()]
        _name_points(axes, [Mark(p.retrieval, p.foils, name=p.name) for p in last])
    return figure


def _trade_off_line(axes: Axes, start: TradeOff, line: Sequence[TradeOff], index: int) -> None:
    marker = MARKERS[index // len(COLORS) % len(MARKERS)]
    for number, point in enumerate(line):
        axes.errorbar(
            point.retrieval,
            point.foils,
            yerr=point.foils_spread,
            xerr=point.retrieval_spread,
            linestyle="none",
            capsize=2,
            label=short(point.name) if not number else None,
            color=color(index),
            marker=marker,
        )
    if len(line) > 1:
        path = [start, *line]
        axes.plot(
            [point.retrieval for point in path],
            [point.foils for point in path],
            line_style(index),
            color=color(index),
            alpha=0.5,
        )
    elif line[0] is not start:
        axes.annotate(
            "",
            (line[0].retrieval, line[0].foils),
            xytext=(start.retrieval, start.foils),
            arrowprops={"arrowstyle": "->", "color": color(index), "alpha": 0.3},
        )
