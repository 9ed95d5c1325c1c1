"""Small charts as inline SVG, without dependencies, at home on light and dark pages.

Text and axes take the page's own text colour (``currentColor``); the series have mid-tone colours
that stand out on white and on black.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from counterfoil.errors import MissingExtraError
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
    level_line,
    vertical_grid,
)
from counterfoil.files import write_atomically

Points = Sequence[tuple[float, float]]
NO_LEVELS: Mapping[str, float] = {}


def line_chart(
    series: Mapping[str, Points],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    levels: Mapping[str, float] = NO_LEVELS,
    width: int = 640,
    height: int = 340,
) -> str:
    """A line per series; NaN and infinite values are gaps. Each level is a dashed line, named.

    >>> chart = line_chart({"R@1": [(0, 10.0), (1, 20.0)]}, "recall", "epoch", "%")
    >>> chart.startswith("<svg") and "R@1" in chart
    True
    """
    runs = {name: _runs(points) for name, points in series.items()}
    points = [point for parts in runs.values() for run in parts for point in run]
    keys = legend_rows(list(series), width - 76) if len(series) > 1 else []
    top = 20 + (24 if title else 0) + LEGEND_LINE * len(keys)
    if not points:
        return empty_chart(title, width, height)
    heights = [*(y for _, y in points), *levels.values()]
    y_ticks = nice_ticks(min(heights), max(heights), max(2, height // 60))
    left = 26 + max(len(tick_text(tick, y_ticks)) for tick in y_ticks) * CHARACTER
    left += 16 if y_label else 0
    x_axis = Axis.over((x for x, _ in points), left, width - 20, max(2, width // 90), snug=True)
    y_axis = Axis(y_ticks[0], y_ticks[-1], height - (48 if x_label else 32), top, y_ticks)
    body = [*grid(x_axis, y_axis), *axis_labels(x_axis, y_axis, x_label, y_label, height)]
    for index, (name, parts) in enumerate(runs.items()):
        body.append(_line(name, parts, x_axis, y_axis, COLOURS[index % len(COLOURS)]))
    for name, level in levels.items():
        body += level_line(name, x_axis, y_axis.at(level))
    body += legend(keys, left, 20 + (24 if title else 0))
    return document(title, width, height, body)


def bar_chart(
    values: Mapping[str, float],
    title: str = "",
    x_label: str = "",
    *,
    width: int = 640,
    bar_height: int = 22,
) -> str:
    """One horizontal bar per name, with its value; bars below zero go to the left.

    >>> "R@10" in bar_chart({"R@1": 52.0, "R@10": 91.5})
    True
    """
    finite = [value for value in values.values() if _drawable(value)]
    top = 12 + (24 if title else 0)
    height = top + (bar_height + 8) * len(values) + (48 if x_label else 32)
    if not finite:
        return empty_chart(title, width, max(height, 100))
    longest = min(max(len(name) for name in values), 36)
    left = 18 + longest * CHARACTER
    axis = Axis.over((*finite, 0.0), left, width - 64, max(2, (width - int(left)) // 90))
    bottom = top + (bar_height + 8) * len(values)
    body = vertical_grid(axis, top, bottom)
    zero = axis.at(0.0)
    for index, (name, value) in enumerate(values.items()):
        y = top + 4 + index * (bar_height + 8)
        middle = y + bar_height / 2 + 4
        shown = name if len(name) <= 36 else name[:35] + "…"
        body.append(label(left - 8, middle, shown, anchor="end", tooltip=name))
        if not _drawable(value):
            body.append(label(zero + 6, middle, "no value", opacity=0.6))
            continue
        x, end = sorted((zero, axis.at(value)))
        body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(end - x, 1):.1f}" height="{bar_height}" '
            f'rx="3" fill="{COLOURS[0]}" fill-opacity="0.85"/>'
        )
        place, anchor = (end + 6, "start") if value >= 0 else (x - 6, "end")
        body.append(label(place, middle, f"{value:.4g}", anchor=anchor, opacity=0.85))
    if x_label:
        body.append(label((left + width - 64) / 2, height - 10, x_label, anchor="middle"))
    return document(title, width, height, body)


def histogram(
    values: Sequence[float],
    title: str = "",
    x_label: str = "",
    y_label: str = "count",
    *,
    bins: int = 20,
    width: int = 640,
    height: int = 300,
) -> str:
    """How often values fall into equal bins; NaN and infinite values are left out.

    >>> histogram([1.0, 2.0, 2.5], bins=2).count("<rect")
    2
    """
    finite = [float(value) for value in values if _drawable(value)]
    if not finite:
        return empty_chart(title, width, height)
    low, high = min(finite), max(finite)
    step = (high - low) / bins if high > low else 1.0 / bins
    low = low if high > low else low - 0.5
    counts = [0] * bins
    for value in finite:
        counts[min(int((value - low) / step), bins - 1)] += 1
    top = 20 + (24 if title else 0)
    ticks = nice_ticks(0, max(counts), max(2, height // 60), whole=True)
    left = 26 + len(tick_text(ticks[-1], ticks)) * CHARACTER + (16 if y_label else 0)
    y_axis = Axis(0.0, ticks[-1], height - (48 if x_label else 32), top, ticks)
    x_axis = Axis.over((low, low + step * bins), left, width - 20, max(2, width // 90), snug=True)
    body = [*grid(x_axis, y_axis), *axis_labels(x_axis, y_axis, x_label, y_label, height)]
    for index, count in enumerate(counts):
        if count:
            x, y = x_axis.at(low + index * step), y_axis.at(count)
            wide = x_axis.at(low + (index + 1) * step) - x
            body.append(
                f'<rect x="{x + 0.75:.1f}" y="{y:.1f}" width="{max(wide - 1.5, 0.5):.1f}" '
                f'height="{y_axis.start - y:.1f}" fill="{COLOURS[0]}" fill-opacity="0.85">'
                f"<title>{tick_text(low + index * step)} to {tick_text(low + (index + 1) * step)}: "
                f"{count}</title></rect>"
            )
    return document(title, width, height, body)


def save_line_chart_png(
    path: Path | str,
    series: Mapping[str, Points],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    levels: Mapping[str, float] = NO_LEVELS,
    width: int = 960,
    height: int = 540,
) -> Path:
    """Write what `line_chart` draws as a PNG file of the given size in pixels."""
    try:
        # The object interface: pyplot would choose a backend for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "saving a chart as PNG") from error
    dpi = 120
    figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(series.items()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name.replace("$", r"\$"),
            color=COLOURS[index % len(COLOURS)],
            marker="o" if len(points) <= 40 else None,
            markersize=3.5,
        )
    for name, level in levels.items():
        label_text = name.replace("$", r"\$")
        axes.axhline(level, linestyle="--", color="grey", linewidth=1.2, label=label_text)
    axes.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel(x_label.replace("$", r"\$"))
    axes.set_ylabel(y_label.replace("$", r"\$"))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1 or levels:
        axes.legend(frameon=False)
    path = Path(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())
    return path


def _drawable(value: float) -> bool:
    # Beyond this, the length of an axis is no longer a finite number.
    return math.isfinite(value) and abs(value) < 1e300


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """Stretches of finite points between the gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _drawable(x) and _drawable(y):
            runs[-1].append((float(x), float(y)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _line(
    name: str, runs: list[list[tuple[float, float]]], x_axis: Axis, y_axis: Axis, colour: str
) -> str:
    dots = sum(len(run) for run in runs) <= 40
    parts = [f"<g><title>{escape(name)}</title>"]
    for run in runs:
        places = [(x_axis.at(x), y_axis.at(y)) for x, y in run]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                'stroke-linejoin="round" stroke-linecap="round"/>'
            )
        if dots or len(places) == 1:
            parts += [_dot(x, y, colour) for x, y in places]
    return "".join([*parts, "</g>"])


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>'
