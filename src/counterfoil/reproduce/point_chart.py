"""Points with error bars and names over a plain or logarithmic axis, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from counterfoil.evaluation.chart_axes import Axis, nice_ticks, tick_text
from counterfoil.evaluation.chart_marks import (
    CHARACTER,
    COLOURS,
    LEGEND_LINE,
    axis_labels,
    document,
    empty_chart,
    grid,
    label,
    legend,
    legend_rows,
    rule,
)


@dataclass(frozen=True)
class Mark:
    """One point: its place, how far it spreads, what it is called, which line it is on."""

    x: float
    y: float
    spread: float | None = None
    name: str = ""
    line: str = ""


def by_line(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """The points of each line in order of x; lines in the order they were met."""
    lines: dict[str, list[Mark]] = {}
    for mark in marks:
        lines.setdefault(mark.line, []).append(mark)
    return {name: sorted(found, key=lambda mark: mark.x) for name, found in lines.items()}


@dataclass(frozen=True)
class Ruler:
    """An x axis: where a value is drawn, and which values are labelled."""

    log: bool
    least: float
    ticks: list[float]

    @classmethod
    def over(cls, values: Sequence[float], log: bool, at_values: bool) -> Ruler:
        """Ticks at the values themselves, or at round ones.

        A logarithmic ruler has its zero one decade below the smallest positive value.
        """
        distinct = sorted(set(values))
        positive = [value for value in distinct if value > 0]
        log = log and bool(positive)
        least = min(positive) if positive else 1.0
        if at_values and len(distinct) <= 8:
            return cls(log, least, distinct)
        if not log:
            return cls(log, least, nice_ticks(distinct[0], distinct[-1], 6))
        first, last = math.floor(math.log10(least)), math.ceil(math.log10(positive[-1]))
        return cls(log, least, [10.0**power for power in range(first, last + 1)])

    def at(self, value: float) -> float:
        if not self.log:
            return value
        return math.log10(value) if value > 0 else math.log10(self.least) - 1


def point_chart(
    marks: Sequence[Mark],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    log: bool = False,
    joined: bool = True,
    width: int = 640,
    height: int = 340,
) -> str:
    """Marks, joined line by line where they are values of one thing.

    >>> "<circle" in point_chart([Mark(0.01, 3.0), Mark(0.1, 4.0, 0.5)], log=True)
    True
    """
    if not marks:
        return empty_chart(title, width, height)
    ruler = Ruler.over([mark.x for mark in marks], log, at_values=joined)
    reach = [mark.y + side * (mark.spread or 0.0) for mark in marks for side in (-1, 1)]
    y_ticks = nice_ticks(min(reach), max(reach), max(2, height // 60))
    left = 42 + max(len(tick_text(tick, y_ticks)) for tick in y_ticks) * CHARACTER
    places = [ruler.at(x) for x in (*(mark.x for mark in marks), *ruler.ticks)]
    room = (max(places) - min(places) or 1.0) * (0.05 if joined else 0.12)
    x_axis = Axis(min(places) - room, max(places) + room, left, width - 20, [])
    lines = by_line(marks)
    names = legend_rows([*lines], width - left) if any(lines) else []
    top = 20 + (24 if title else 0)
    y_axis = Axis(y_ticks[0], y_ticks[-1], height - 48, top + len(names) * LEGEND_LINE, y_ticks)
    body = [*grid(x_axis, y_axis), *axis_labels(x_axis, y_axis, x_label, y_label, height)]
    body += legend(names, left, top + 2)
    for tick in ruler.ticks:
        x = x_axis.at(ruler.at(tick))
        body.append(rule(x, y_axis.start, x, y_axis.start + 4, 0.5))
        body.append(label(x, y_axis.start + 17, tick_text(tick), anchor="middle", opacity=0.75))
    for number, of_line in enumerate(lines.values()):
        colour = COLOURS[number % len(COLOURS)]
        if joined and len(of_line) > 1:
            path = " ".join(f"{x_axis.at(ruler.at(m.x)):.1f},{y_axis.at(m.y):.1f}" for m in of_line)
            body.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        for place, mark in enumerate(of_line):
            own = colour if joined else COLOURS[place % len(COLOURS)]
            body += _mark(mark, x_axis.at(ruler.at(mark.x)), y_axis, own)
    return document(title, width, height, body)


def _mark(mark: Mark, x: float, y_axis: Axis, colour: str) -> list[str]:
    y = y_axis.at(mark.y)
    parts = []
    if mark.spread:
        low, high = y_axis.at(mark.y - mark.spread), y_axis.at(mark.y + mark.spread)
        parts.append(
            f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
    if mark.name:
        parts.append(label(x + 8, y + 4, mark.name))
    return parts
