"""Several numbers of the same rows side by side, each over a range of its own, as inline SVG.

Rows that are alike in one number may differ in another; bars from zero would show neither.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterfoil.evaluation.chart_axes import Axis
from counterfoil.evaluation.chart_marks import (
    CHARACTER,
    COLOURS,
    document,
    empty_chart,
    label,
    rule,
    vertical_grid,
)

WIDTH = 860
LONGEST = 34
ROOM, GAP = 150, 32
LINE, HEADING = 24, 15


@dataclass(frozen=True)
class Dot:
    """A mean over seeds, and how far they spread."""

    mean: float
    spread: float | None = None

    @property
    def reach(self) -> tuple[float, float]:
        return self.mean - (self.spread or 0.0), self.mean + (self.spread or 0.0)


@dataclass(frozen=True)
class Panel:
    """One number: its name, and a dot for each row that has it."""

    title: str
    dots: Sequence[Dot | None]

    @property
    def found(self) -> list[Dot]:
        return [dot for dot in self.dots if dot is not None]

    def axis(self, start: float, end: float) -> Axis:
        reached = [value for dot in self.found for value in dot.reach]
        return Axis.over(reached, start, end, 3)


def panel_chart(names: Sequence[str], panels: Sequence[Panel], title: str = "") -> str:
    """A dot with its spread for every row in every panel; lines of panels repeat the rows' names.

    Each panel must have a dot, or all of them none.

    >>> panel_chart(["a", "b"], [Panel("RSUM", [Dot(1.0, 0.5), Dot(2.0)])]).count("<circle")
    2
    """
    if not any(panel.found for panel in panels):
        return empty_chart(title, WIDTH, 160)
    left = 26 + min(max(map(len, names)), LONGEST) * CHARACTER
    at_once = max(1, int((WIDTH - left) // ROOM))
    wide = (WIDTH - left) / min(at_once, len(panels))
    y: float = 20 + (18 if title else 0)
    body: list[str] = []
    for first in range(0, len(panels), at_once):
        line = panels[first : first + at_once]
        heads = [textwrap.wrap(panel.title, int((wide - 8) / CHARACTER)) for panel in line]
        top = y + HEADING * max(map(len, heads))
        body += _names(names, left, top)
        for place, (panel, head) in enumerate(zip(line, heads, strict=True)):
            start = left + place * wide + 6
            body += [
                label(start, y + HEADING * (number + 1) - 5, text)
                for number, text in enumerate(head)
            ]
            body += _panel(panel, panel.axis(start, start + wide - GAP), top)
        y = top + LINE * len(names) + 40
    return document(title, WIDTH, round(y - 10), body)


def _names(names: Sequence[str], left: float, top: float) -> Iterator[str]:
    for number, name in enumerate(names):
        shown = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
        y = top + LINE * (number + 0.5) + 4
        yield label(left - 10, y, shown, anchor="end", tooltip=name)


def _panel(panel: Panel, axis: Axis, top: float) -> Iterator[str]:
    yield from vertical_grid(axis, top, top + LINE * len(panel.dots))
    for number, dot in enumerate(panel.dots):
        y = top + LINE * (number + 0.5)
        yield rule(axis.start, y, axis.end, y, 0.08)
        if dot is None:
            continue
        colour = COLOURS[number % len(COLOURS)]
        if dot.spread:
            low, high = map(axis.at, dot.reach)
            yield (
                f'<line x1="{low:.1f}" y1="{y:.1f}" x2="{high:.1f}" y2="{y:.1f}" '
                f'stroke="{colour}" stroke-width="2"/>'
            )
        said = f"{dot.mean:.4g}" if dot.spread is None else f"{dot.mean:.4g} ± {dot.spread:.2g}"
        yield (
            f'<circle cx="{axis.at(dot.mean):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}">'
            f"<title>{said}</title></circle>"
        )
