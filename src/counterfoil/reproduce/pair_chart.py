"""Our number and the paper's, row by row, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterfoil.evaluation.chart_axes import Axis
from counterfoil.evaluation.chart_marks import (
    CHARACTER,
    COLOURS,
    document,
    empty_chart,
    label,
    legend,
    legend_rows,
    vertical_grid,
)

LONGEST = 36
BAR = 10


@dataclass(frozen=True)
class Pair:
    """A row: what was measured, how far it spreads over seeds, what was published."""

    name: str
    ours: float | None
    spread: float | None
    published: float | None


def pair_chart(
    pairs: Sequence[Pair], title: str = "", names: Sequence[str] = ("ours", "paper")
) -> str:
    """Two bars a row, the upper one ours.

    >>> pair_chart([Pair("HN", 480.0, 2.0, 484.6), Pair("NAAF", None, None, 513.2)]).count("<rect")
    3
    """
    values = [value for pair in pairs for value in (pair.ours, pair.published) if value is not None]
    top = 44 + (24 if title else 0)
    line = 2 * BAR + 12
    height, width = top + line * len(pairs) + 32, 640
    if not values:
        return empty_chart(title, width, height)
    left = 18 + min(max(len(pair.name) for pair in pairs), LONGEST) * CHARACTER
    axis = Axis.over((0.0, *values), left, width - 64, max(2, (width - int(left)) // 90))
    body = vertical_grid(axis, top, top + line * len(pairs))
    body += legend(legend_rows(list(names), width - left), left, top - 20)
    for number, pair in enumerate(pairs):
        y = top + 6 + number * line
        shown = pair.name if len(pair.name) <= LONGEST else pair.name[: LONGEST - 1] + "…"
        body.append(label(left - 8, y + BAR + 4, shown, anchor="end", tooltip=pair.name))
        for place, value in enumerate((pair.ours, pair.published)):
            if value is not None:
                spread = pair.spread if place == 0 else None
                body += _bar(axis, y + place * BAR, value, spread, COLOURS[place])
    return document(title, width, height, body)


def _bar(axis: Axis, y: float, value: float, spread: float | None, colour: str) -> list[str]:
    start, end = axis.at(0.0), axis.at(value)
    parts = [
        f'<rect x="{start:.1f}" y="{y:.1f}" width="{max(end - start, 1):.1f}" '
        f'height="{BAR - 1}" fill="{colour}" fill-opacity="0.85"/>'
    ]
    if spread:
        low, high = axis.at(value - spread), axis.at(value + spread)
        parts.append(
            f'<line x1="{low:.1f}" y1="{y + BAR / 2:.1f}" x2="{high:.1f}" y2="{y + BAR / 2:.1f}" '
            'stroke="currentColor" stroke-width="1.5"/>'
        )
        end = max(end, high)
    parts.append(label(end + 5, y + BAR - 1, f"{value:.1f}", opacity=0.85))
    return parts
