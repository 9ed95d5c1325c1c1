"""Marks that charts are made of: rules, labels, legends, and the picture around them."""

from __future__ import annotations

import textwrap
from html import escape

from counterfoil.evaluation.chart_axes import Axis, tick_text

COLOURS = (
    "#3b82f6",
    "#f59e0b",
    "#10b981",
    "#ef4444",
    "#8b5cf6",
    "#06b6d4",
    "#ec4899",
    "#84cc16",
)

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
CHARACTER = 6.4  # mean width of a character at 11.5 px
LEGEND_LINE = 18
TITLE_CHARACTER = 7.4  # the same, bold, at 14 px
TITLE_LINE = 18


def grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    """Horizontal lines at the ticks of y, marks at the ticks of x, all labelled."""
    lines = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        lines.append(rule(x_axis.start, y, x_axis.end, y, 0.15))
        name = tick_text(tick, y_axis.ticks)
        lines.append(label(x_axis.start - 8, y + 4, name, anchor="end", opacity=0.75))
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        lines.append(rule(x, y_axis.start, x, y_axis.start + 4, 0.5))
        name = tick_text(tick, x_axis.ticks)
        lines.append(label(x, y_axis.start + 17, name, anchor="middle", opacity=0.75))
    lines.append(rule(x_axis.start, y_axis.start, x_axis.end, y_axis.start, 0.5))
    return lines


def vertical_grid(axis: Axis, top: float, bottom: float) -> list[str]:
    """Vertical lines at the ticks, labelled below."""
    lines = []
    for tick in axis.ticks:
        x = axis.at(tick)
        lines.append(rule(x, top, x, bottom, 0.5 if tick == 0 else 0.15))
        name = tick_text(tick, axis.ticks)
        lines.append(label(x, bottom + 16, name, anchor="middle", opacity=0.75))
    return lines


def axis_labels(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str, height: int) -> list[str]:
    """What the axes mean."""
    labels = []
    if x_label:
        middle = (x_axis.start + x_axis.end) / 2
        labels.append(label(middle, height - 10, x_label, anchor="middle"))
    if y_label:
        middle = (y_axis.start + y_axis.end) / 2
        labels.append(label(16, middle, y_label, anchor="middle", turn=True))
    return labels


def legend_rows(names: list[str], room: float) -> list[list[tuple[int, str]]]:
    """Names of the series, wrapped into rows no wider than ``room``."""
    rows: list[list[tuple[int, str]]] = [[]]
    used = 0.0
    for index, name in enumerate(names):
        wide = _legend_width(name)
        if rows[-1] and used + wide > room:
            rows.append([])
            used = 0.0
        rows[-1].append((index, name))
        used += wide
    return rows


def _legend_width(name: str) -> float:
    return 36 + min(len(name), 40) * CHARACTER


def legend(rows: list[list[tuple[int, str]]], left: float, top: float) -> list[str]:
    """A short line in its colour before the name of each series."""
    marks = []
    for line, row in enumerate(rows):
        x, y = left, top + line * LEGEND_LINE
        for index, name in row:
            colour = COLOURS[index % len(COLOURS)]
            shown = name if len(name) <= 40 else name[:39] + "…"
            marks.append(
                f'<line x1="{x:.1f}" y1="{y - 4}" x2="{x + 16:.1f}" y2="{y - 4}" '
                f'stroke="{colour}" stroke-width="3" stroke-linecap="round"/>'
            )
            marks.append(label(x + 22, y, shown, tooltip=name))
            x += _legend_width(name)
    return marks


def rule(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    """A line in the page's text colour."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="currentColor" stroke-opacity="{opacity}"/>'
    )


def level_line(name: str, x_axis: Axis, y: float) -> list[str]:
    """A dashed horizontal line at height ``y``, with its name above its right end."""
    return [
        f'<line x1="{x_axis.start:.1f}" y1="{y:.1f}" x2="{x_axis.end:.1f}" y2="{y:.1f}" '
        'stroke="currentColor" stroke-opacity="0.7" stroke-width="1.5" stroke-dasharray="6 4"/>',
        label(x_axis.end, y - 5, name, anchor="end", opacity=0.85),
    ]


def label(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    opacity: float = 1.0,
    turn: bool = False,
    tooltip: str = "",
) -> str:
    """Escaped text; what was shortened shows in full under the pointer."""
    rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    hover = f"<title>{escape(tooltip)}</title>" if tooltip and tooltip != text else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill-opacity="{opacity}"'
        f"{rotate}>{escape(text)}{hover}</text>"
    )


def empty_chart(title: str, width: int, height: int) -> str:
    """A chart that says there is nothing to draw."""
    note = label(width / 2, height / 2, "no data", anchor="middle", opacity=0.6)
    return document(title, width, height, [note])


def document(title: str, width: int, height: int, body: list[str]) -> str:
    """The whole picture; it shrinks with its column, and grows upwards with a title too long."""
    lines = textwrap.wrap(title, max(1, int((width - 40) / TITLE_CHARACTER)))
    above = TITLE_LINE * max(0, len(lines) - 1)
    heading = "".join(
        f'<text x="20" y="{22 - above + number * TITLE_LINE}" font-size="14" font-weight="600">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    height += above
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-above} {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title or "chart")}" '
        f'style="max-width:100%;height:auto" font-family="{escape(FONT)}" font-size="11.5" '
        f'fill="currentColor">{heading}{"".join(body)}</svg>'
    )
