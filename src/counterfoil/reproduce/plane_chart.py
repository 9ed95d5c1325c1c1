"""Points of several groups in a plane, as inline SVG or on the axes of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from counterfoil.evaluation.chart_axes import Axis
from counterfoil.evaluation.chart_marks import (
    COLOURS,
    LEGEND_LINE,
    axis_labels,
    document,
    empty_chart,
    grid,
    legend,
    legend_rows,
)

Groups = Mapping[str, Sequence[tuple[float, float]]]
FEW = 10
"""Groups of so many points are drawn larger: they are what the others are compared with."""


def map_chart(
    groups: Groups,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    diagonal: bool = False,
    width: int = 640,
    height: int = 480,
) -> str:
    """A dot for each point, small groups last and larger.

    >>> map_chart({"a": [(0, 0), (1, 1)], "b": [(2, 0)]}).count("<circle")
    3
    """
    points = [point for some in groups.values() for point in some]
    if not points:
        return empty_chart(title, width, height)
    keys = legend_rows(list(groups), width - 76)
    top = 20 + (24 if title else 0) + LEGEND_LINE * len(keys)
    x_axis = Axis.over((x for x, _ in points), 64, width - 20, max(2, width // 90))
    y_axis = Axis.over((y for _, y in points), height - 48, top, max(2, height // 60))
    body = [*grid(x_axis, y_axis), *axis_labels(x_axis, y_axis, x_label, y_label, height)]
    if diagonal:
        body += _diagonal(points, x_axis, y_axis)
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(groups)}
    for name, some in sorted(groups.items(), key=lambda group: -len(group[1])):
        size, opacity = (6.0, 1.0) if len(some) <= FEW else (2.6, 0.6)
        body += [
            f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="{size}" '
            f'fill="{colours[name]}" fill-opacity="{opacity}"/>'
            for x, y in some
        ]
    body += legend(keys, 64, 20 + (24 if title else 0))
    return document(title, width, height, body)


def _diagonal(points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> list[str]:
    """Where x equals y, as far as both axes have it."""
    ends = _shared_range(points)
    if ends is None:
        return []
    low, high = ends
    return [
        f'<line x1="{x_axis.at(low):.1f}" y1="{y_axis.at(low):.1f}" x2="{x_axis.at(high):.1f}" '
        f'y2="{y_axis.at(high):.1f}" stroke="currentColor" stroke-opacity="0.7" '
        'stroke-dasharray="6 4"/>'
    ]


def _shared_range(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Values that occur on both axes, from the lowest to the highest; None if there are none."""
    if not points:
        return None
    low = max(min(point[axis] for point in points) for axis in (0, 1))
    high = min(max(point[axis] for point in points) for axis in (0, 1))
    return (low, high) if low < high else None


def draw_map(axes: Any, groups: Groups, diagonal: bool) -> None:
    """The same with matplotlib."""
    for place, (name, some) in enumerate(groups.items()):
        few = len(some) <= FEW
        axes.scatter(
            [x for x, _ in some],
            [y for _, y in some],
            s=60 if few else 8,
            alpha=1.0 if few else 0.6,
            color=COLOURS[place % len(COLOURS)],
            label=name,
            zorder=3 if few else 2,
        )
    ends = _shared_range([point for some in groups.values() for point in some])
    if diagonal and ends is not None:
        axes.plot(ends, ends, "--", color="grey", linewidth=1.2)
    axes.legend(frameon=False)
