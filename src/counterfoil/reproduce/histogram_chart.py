"""Histograms of matched and mismatched similarities with their fitted normals and the boundary.

A grid of panels: a line of it is a row of the figure, a column an epoch. All share one x axis.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from counterfoil.evaluation.chart_axes import Axis
from counterfoil.evaluation.chart_marks import (
    CHARACTER,
    COLOURS,
    document,
    label,
    rule,
    vertical_grid,
)
from counterfoil.reproduce.distributions import describe_samples
from counterfoil.reproduce.results import Distribution

WIDTH, TALL, HEAD = 1020, 200, 38
BARS = 60
"""Bars of a panel, at most."""

KINDS = {"matched": COLOURS[0], "mismatched": COLOURS[3]}

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class HistogramPanel:
    """Densities by kind: bars [left, right, height] and the curve of the fitted normal."""

    title: str
    notes: tuple[str, ...]
    bars: dict[str, list[tuple[float, float, float]]]
    curves: dict[str, Points]
    boundary: float

    @property
    def top(self) -> float:
        heights = [height for bars in self.bars.values() for *_, height in bars]
        return max([*heights, *(y for curve in self.curves.values() for _, y in curve)])


@dataclass(frozen=True)
class HistogramGrid:
    """Panels line by line; None where a row has nothing for a column."""

    title: str
    low: float
    high: float
    lines: list[list[HistogramPanel | None]]

    def svg(self) -> str:
        columns = max(map(len, self.lines))
        wide = (WIDTH - 20) / columns
        body = list(_legend(48))
        for number, line in enumerate(self.lines):
            top = 74 + number * (TALL + 24)
            for place, panel in enumerate(line):
                if panel is not None:
                    left = 20 + place * wide
                    ends = left, left + wide - 24
                    axis = Axis.over((self.low, self.high), *ends, 5, snug=True)
                    body += _panel(panel, axis, top)
        return document(self.title, WIDTH, 74 + len(self.lines) * (TALL + 24), body)

    def draw(self, figure: Any) -> None:
        columns = max(map(len, self.lines))
        figure.set_size_inches(3.6 * columns, 2.6 * len(self.lines) + 0.6)
        figure.suptitle(textwrap.fill(self.title, 90), fontweight="bold", fontsize=10)
        for number, line in enumerate(self.lines):
            for place, panel in enumerate(line):
                if panel is not None:
                    axes = figure.add_subplot(
                        len(self.lines), columns, number * columns + place + 1
                    )
                    _draw(axes, panel, (self.low, self.high))


def histogram_grid(title: str, distributions: Sequence[Distribution]) -> HistogramGrid:
    """A line for each row, a column for each epoch that any row shows."""
    rows = dict.fromkeys(one.row for one in distributions)
    columns = dict.fromkeys(one.when for one in distributions)
    by_place = {(one.row, one.when): _panel_of(one) for one in distributions}
    return HistogramGrid(
        title,
        min(min(one.low, one.boundary) for one in distributions),
        max(max(one.high, one.boundary) for one in distributions),
        [[by_place.get((row, when)) for when in columns] for row in rows],
    )


def _panel_of(one: Distribution) -> HistogramPanel:
    bars, curves = {}, {}
    drawn = describe_samples(one.model_dump())  # of the seed that is drawn, not over all seeds
    for kind, counts in (("matched", one.matched), ("mismatched", one.mismatched)):
        if not any(counts):
            continue
        bars[kind] = density_bars(one.low, one.high, counts)
        mean, std = drawn[f"{kind}_mean"], drawn[f"{kind}_std"]
        curves[kind] = normal_curve(one.low, one.high, mean, max(std, 1e-3))
    errors = {"matched_below": "matched below", "mismatched_above": "mismatched above"}
    shares = [f"{drawn[key]:.1f} % {text}" for key, text in errors.items() if key in drawn]
    alpha = "" if one.alpha is None else f", α = {one.alpha:g}"
    return HistogramPanel(
        f"{one.row}: epoch {one.epoch} ({one.when})",
        (f"t = {one.boundary:.3f}{alpha}", ", ".join(shares)),
        bars,
        curves,
        one.boundary,
    )


def density_bars(
    low: float, high: float, counts: Sequence[int]
) -> list[tuple[float, float, float]]:
    """At most BARS bars with an area of one together, neighbouring bins joined.

    >>> density_bars(0.0, 1.0, [1, 3])
    [(0.0, 0.5, 0.5), (0.5, 1.0, 1.5)]
    """
    width = (high - low) / len(counts)
    size = -(-len(counts) // BARS)
    total = sum(counts) * width
    bars = []
    for first in range(0, len(counts), size):
        part = counts[first : first + size]
        left = low + first * width
        bars.append((left, left + len(part) * width, sum(part) / (total * len(part))))
    return bars


def normal_curve(low: float, high: float, mean: float, std: float) -> Points:
    """Density of a normal distribution from end to end."""
    points = []
    for step in range(121):
        x = low + (high - low) * step / 120
        height = math.exp(-(((x - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
        points.append((x, height))
    return points


def _legend(y: float) -> Iterator[str]:
    x = 20.0
    for name, colour in KINDS.items():
        yield (
            f'<line x1="{x:.1f}" y1="{y - 4}" x2="{x + 16:.1f}" y2="{y - 4}" stroke="{colour}" '
            'stroke-width="6" stroke-opacity="0.6"/>'
        )
        yield label(x + 22, y, name)
        x += 44 + CHARACTER * len(name)
    yield label(x, y, "curves: normal distributions of the same mean and deviation; dashed: t")


def _panel(panel: HistogramPanel, axis: Axis, top: float) -> Iterator[str]:
    bottom = top + TALL - 30
    heights = Axis(0.0, panel.top, bottom, top + HEAD, ())
    room = int((axis.end - axis.start) / CHARACTER)
    for number, text in enumerate((panel.title, *panel.notes)):
        fitted = text if len(text) <= room else text[: room - 1] + "…"
        yield label(axis.start, top + 15 * number, fitted, tooltip=text)
    yield from vertical_grid(axis, top + HEAD, bottom)
    yield rule(axis.start, bottom, axis.end, bottom, 0.5)
    for kind, bars in panel.bars.items():
        for left, right, height in bars:
            if height:
                x, y = axis.at(left), heights.at(height)
                yield (
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{axis.at(right) - x:.1f}" '
                    f'height="{bottom - y:.1f}" fill="{KINDS[kind]}" fill-opacity="0.4"/>'
                )
    for kind, curve in panel.curves.items():
        points = " ".join(f"{axis.at(x):.1f},{heights.at(y):.1f}" for x, y in curve)
        yield (
            f'<polyline points="{points}" fill="none" stroke="{KINDS[kind]}" stroke-width="1.5"/>'
        )
    x = axis.at(panel.boundary)
    yield (
        f'<line class="boundary" x1="{x:.1f}" y1="{top + HEAD:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" '
        'stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 3"/>'
    )


def _draw(axes: Any, panel: HistogramPanel, ends: tuple[float, float]) -> None:
    for kind, bars in panel.bars.items():
        axes.bar(
            [left for left, _, _ in bars],
            [height for *_, height in bars],
            [right - left for left, right, _ in bars],
            align="edge",
            color=KINDS[kind],
            alpha=0.4,
            label=kind,
        )
        axes.plot(*zip(*panel.curves[kind], strict=True), color=KINDS[kind], linewidth=1.2)
    axes.axvline(panel.boundary, color="black", linestyle="--", linewidth=1.2)
    axes.set_xlim(*ends)
    axes.set_yticks([])
    axes.set_title("\n".join((panel.title, *panel.notes)), loc="left", fontsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
