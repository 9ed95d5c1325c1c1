"""Charts that compare rows of a table: ours with the paper's, and several numbers side by side."""

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
    head_of,
    line_style,
    margin_of,
    name_rows,
    new_axes,
    new_figure,
    place_axes,
    say_no_data,
    short,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pair:
    """A row: what was measured, its deviation over seeds, what was published."""

    name: str
    ours: float | None
    spread: float | None
    published: float | None


@dataclass(frozen=True)
class Dot:
    """A mean over seeds, and its deviation."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Panel:
    """One number: its name, and a dot for each row that has it."""

    title: str
    dots: Sequence[Dot | None]


@dataclass(frozen=True)
class Mark:
    """One point: its place, its deviation, its name, the line it is on."""

    x: float
    y: float
    spread: float | None = None
    name: str = ""
    line: str = ""


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
        title, "", "", names, size, margin_of([pair.name for pair in pairs])
    )
    sides = {names[0]: [pair.ours for pair in pairs], names[1]: [pair.published for pair in pairs]}
    for side, (name, values) in enumerate(sides.items()):
        known = {row: value for row, value in enumerate(values) if value is not None}
        if not known:
            continue
        rows = [row + 0.38 * side - 0.19 for row in known]
        axes.barh(rows, list(known.values()), 0.36, color=COLORS[side], label=name)
        for place, (row, value) in zip(rows, known.items(), strict=True):
            spread = (pairs[row].spread or 0.0) if side == 0 else 0.0
            if spread:
                axes.errorbar(value, place, xerr=spread, ecolor=INK, capsize=2)
            axes.annotate(
                f"{value:.1f}",
                (value + spread, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    if not axes.patches:
        say_no_data(axes)
        return figure
    name_rows(axes, [pair.name for pair in pairs])
    axes.margins(x=0.1)
    add_legend(axes, columns)
    return figure


@styled
def panel_chart(names: Sequence[str], panels: Sequence[Panel], title: str = "") -> Figure:
    """A dot with its deviation for every row in every panel, each over a range of its own.

    Rows that are alike in one number may differ in another; bars from zero would show neither.
    """
    across = max(1, min(4, len(panels)))
    left, line = margin_of(names), 0.24 * len(names)
    width = max(6.0, left + 1.8 * across)
    heads = [textwrap.wrap(panel.title, 24) for panel in panels]
    rows = range(0, len(panels), across)
    tops = [0.1 + 0.16 * max(map(len, heads[row : row + across])) for row in rows]
    top = head_of(title, width)
    figure = new_figure(title, width, top + sum(tops) + len(rows) * (line + 0.35) + 0.1)
    if not any(dot for panel in panels for dot in panel.dots):
        say_no_data(place_axes(figure, 0, 0, width, 1.0))
        return figure
    for number, (panel, head) in enumerate(zip(panels, heads, strict=True)):
        row, place = divmod(number, across)
        down = top + sum(tops[: row + 1]) + row * (line + 0.35)
        axes = place_axes(figure, left + 1.8 * place, down, 1.6, line)
        _draw_panel(axes, panel, names if place == 0 else [""] * len(names))
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
    """Points with their deviations; joined line by line, or each with its name.

    A logarithmic axis has its zero one decade below the smallest positive value.
    """
    lines: dict[str, list[Mark]] = {}
    for mark in sorted(marks, key=lambda mark: mark.x):
        lines.setdefault(mark.line, []).append(mark)
    order = list(dict.fromkeys(mark.line for mark in marks))
    names = order if any(order) else []
    figure, axes, columns = new_axes(title, x_label, y_label, names)
    if not marks:
        say_no_data(axes)
        return figure
    _scale_x(axes, sorted({mark.x for mark in marks}), log, joined)
    for place, name in enumerate(order):
        of_line = lines[name]
        colors = [color(place)] if joined else [color(row) for row in range(len(of_line))]
        parts = [of_line] if joined else [[mark] for mark in of_line]
        for own, part in zip(colors, parts, strict=True):
            axes.errorbar(
                [mark.x for mark in part],
                [mark.y for mark in part],
                [mark.spread or 0.0 for mark in part],
                fmt=f"o{line_style(place)}",
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
    """A plain or logarithmic axis with ticks at the few values there are, or at round ones."""
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
    """Names beside their points, on the side that has more room."""
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
