"""Points in a plane, words against regions, similarities around a boundary, and examples."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from counterfoil.plots.charts import (
    COLORS,
    INK,
    add_legend,
    color,
    head_of,
    margin_of,
    new_axes,
    new_figure,
    place_axes,
    say_no_data,
    short,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_LARGE_POINTS = 10
"""Groups of so many points are drawn larger: they are what the others are compared with."""

MAX_BARS = 60
"""Bars of a histogram, at most."""

KINDS = {"matched": COLORS[0], "mismatched": COLORS[1]}


@styled
def plane_chart(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    diagonal: bool = False,
) -> Figure:
    """A dot for each point, small groups above the others and larger.

    ``diagonal`` draws x = y as far as both axes have values.
    """
    figure, axes, columns = new_axes(title, x_label, y_label, list(groups), (8.0, 5.6))
    points = [point for some in groups.values() for point in some]
    if not points:
        say_no_data(axes)
        return figure
    for place, (name, some) in enumerate(groups.items()):
        few = len(some) <= MAX_LARGE_POINTS
        axes.scatter(
            [x for x, _ in some],
            [y for _, y in some],
            s=60 if few else 10,
            alpha=1.0 if few else 0.6,
            color=color(place),
            edgecolors="white" if few else "none",
            label=short(name),
            zorder=3 if few else 2,
        )
    low, high = np.min(points, axis=0).max(), np.max(points, axis=0).min()
    if diagonal and low < high:
        axes.plot([low, high], [low, high], "--", color=INK, linewidth=1.2, alpha=0.7)
    add_legend(axes, columns)
    return figure


@dataclass(frozen=True)
class DensityPanel:
    """Counts of similarities by kind in equal bins, the mean and deviation of each, a boundary."""

    title: str
    low: float
    high: float
    counts: Mapping[str, Sequence[int]]
    normals: Mapping[str, tuple[float, float]]
    boundary: float


@styled
def density_grid(title: str, lines: Sequence[Sequence[DensityPanel | None]]) -> Figure:
    """Histograms with an area of one, the normals of the same moments, and the boundary, dashed.

    All panels share one x axis; a place may be empty.
    """
    columns = max(map(len, lines))
    width = 3.7 * columns + 0.2
    top = head_of(title, width) + 0.25
    figure = new_figure(title, width, top + 2.5 * len(lines))
    panels = [panel for line in lines for panel in line if panel is not None]
    low = min(min(panel.low, panel.boundary) for panel in panels)
    high = max(max(panel.high, panel.boundary) for panel in panels)
    shown: dict[str, Artist] = {}  # each kind of mark once
    for row, line in enumerate(lines):
        for place, panel in enumerate(line):
            if panel is not None:
                axes = place_axes(figure, 0.2 + 3.7 * place, top + 2.5 * row + 0.55, 3.4, 1.6)
                _draw_densities(axes, panel)
                axes.set_xlim(low, high)
                handles, labels = axes.get_legend_handles_labels()
                shown |= zip(labels, handles, strict=True)
    upper = 1 - (top - 0.25) / figure.get_size_inches()[1]
    place_of = {"loc": "upper left", "bbox_to_anchor": (0, upper), "fontsize": 8}
    figure.legend(list(shown.values()), list(shown), ncols=5 if columns > 1 else 2, **place_of)
    return figure


def _draw_densities(axes: Axes, panel: DensityPanel) -> None:
    for kind, counts in panel.counts.items():
        edges = np.linspace(panel.low, panel.high, len(counts) + 1)
        centers = (edges[:-1] + edges[1:]) / 2
        wide = sorted({*edges[:: -(-len(counts) // MAX_BARS)].tolist(), float(edges[-1])})
        heights, _ = np.histogram(centers, wide, weights=counts, density=True)
        hue = KINDS[kind]
        axes.stairs(heights, wide, fill=True, alpha=0.4, color=hue, label=kind)
        mean, std = panel.normals[kind]
        x = np.linspace(panel.low, panel.high, 121)
        y = np.exp(-(((x - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
        axes.plot(x, y, color=hue, linewidth=1.3, label=f"normal of {kind}")
    axes.axvline(panel.boundary, color=INK, linestyle="--", linewidth=1.2, label="boundary t")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(panel.title, fontsize=8)


@dataclass(frozen=True)
class WordMaps:
    """A caption with one image: a titled map of words (rows) × regions (columns) per model."""

    heading: str
    words: Sequence[str]
    regions: Sequence[str]
    maps: Sequence[tuple[str, Sequence[Sequence[float]]]]


@styled
def word_maps(title: str, pairs: Sequence[WordMaps]) -> Figure:
    """Heat maps, model beside model: red is for a match, blue against it."""
    columns = max(len(pair.maps) for pair in pairs)
    left = margin_of([word for pair in pairs for word in pair.words], 18)
    across = left + 5.3
    top = head_of(title, across * columns)
    heights = [1.45 + 0.2 * len(pair.words) for pair in pairs]
    figure = new_figure(title, across * columns, top + sum(heights))
    for pair, height in zip(pairs, heights, strict=True):
        for place, (name, values) in enumerate(pair.maps):
            size = 4.4, height - 1.45
            axes = place_axes(figure, place * across + left, top + 0.45, *size)
            scale = place_axes(figure, place * across + left + 4.5, top + 0.45, 0.12, size[1])
            _draw_map(axes, scale, pair, values)
            axes.set_title(f"{pair.heading}\n{name}")
        top += height
    return figure


def _draw_map(axes: Axes, scale: Axes, pair: WordMaps, values: Sequence[Sequence[float]]) -> None:
    regions = [short(region, 18) for region in pair.regions]
    numbers = np.asarray(values, dtype=float).reshape(len(pair.words), len(regions))
    full = np.abs(numbers).max(initial=0.0) or 1.0
    edges = np.arange(len(regions) + 1) - 0.5, np.arange(len(pair.words) + 1) - 0.5
    picture = axes.pcolormesh(*edges, numbers, cmap="RdBu_r", vmin=-full, vmax=full)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_yticks(range(len(pair.words)), [short(w, 18) for w in pair.words], fontsize=8)
    axes.set_xticks(range(len(regions)), regions, fontsize=7)
    for name in axes.get_xticklabels():
        name.set(rotation=60, ha="right", rotation_mode="anchor")
    axes.figure.colorbar(picture, cax=scale)


@dataclass(frozen=True)
class ShownWord:
    """A word of an example; whether it is new, and how likely it is wrong, if that is known."""

    text: str
    new: bool
    wrong: float | None


@dataclass(frozen=True)
class ShownExample:
    """An image (base64 of a JPEG file, or nothing) and sentences, each under a heading."""

    name: str
    picture: str
    sentences: Sequence[tuple[str, Sequence[ShownWord]]]


WIDTH, LEFT, LINE = 9.0, 2.5, 0.27


@styled
def example_sheet(title: str, examples: Sequence[ShownExample]) -> Figure:
    """A block for each example: its picture, and its sentences word by word.

    New words are bold. The ground of a word goes from green to yellow, as in the paper: the more
    yellow, the likelier the word is wrong.
    """
    blocks = [[(head, _lines_of(words)) for head, words in one.sentences] for one in examples]
    needed = [sum(LINE * (1.2 + len(lines)) for _, lines in block) for block in blocks]
    heights = [max(2.4, height + 0.3) for height in needed]
    top = head_of(title, WIDTH) + 0.1
    tall = sum(heights) + top
    figure = new_figure(title, WIDTH, tall)
    page = place_axes(figure, 0, 0, WIDTH, tall)
    page.set_axis_off()
    page.set_xlim(0, WIDTH)
    page.set_ylim(tall, 0)
    for example, block, height in zip(examples, blocks, heights, strict=True):
        y = top + 0.1
        page.text(0.2, y, short(example.name, 30), fontsize=8, alpha=0.8, va="center")
        if example.picture:
            _draw_picture(place_axes(figure, 0.2, y + 0.15, 2.0, 2.0), example.picture)
        for head, lines in block:
            page.text(LEFT, y, head, fontsize=8, alpha=0.8, va="center")
            for number, line in enumerate(lines, 1):
                for x, word in line:
                    _draw_word(page, x, y + number * LINE, word)
            y += LINE * (1.2 + len(lines))
        top += height
    return figure


def _lines_of(words: Sequence[ShownWord]) -> list[list[tuple[float, ShownWord]]]:
    """Words with where each begins, broken into lines."""
    lines: list[list[tuple[float, ShownWord]]] = [[]]
    x = LEFT
    for word in words:
        wide = _width(word) + 0.12
        if x + wide > WIDTH - 0.2 and lines[-1]:
            lines.append([])
            x = LEFT
        lines[-1].append((x, word))
        x += wide
    return lines


def _width(word: ShownWord) -> float:
    """Inches of a word as it is drawn."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    face = FontProperties(family="DejaVu Sans", weight="bold" if word.new else "normal")
    path = TextPath((0, 0), word.text.replace("$", "S"), size=9.5, prop=face)
    return float(path.get_extents().x1) / 72 if len(path.vertices) else 0.05


def _draw_word(page: Axes, x: float, y: float, word: ShownWord) -> None:
    ground = None
    if word.wrong is not None:
        likely = min(1.0, max(0.0, word.wrong))
        red, green, blue = (
            a + likely * (b - a) for a, b in ((0.13, 0.98), (0.77, 0.8), (0.37, 0.08))
        )
        ground = {
            "boxstyle": "round,pad=0.2", "facecolor": (red, green, blue, 0.45), "linewidth": 0,
        }  # fmt: skip
    weight = "bold" if word.new else "normal"
    page.text(x, y, word.text, fontsize=9.5, weight=weight, va="center_baseline", bbox=ground)


def _draw_picture(axes: Axes, picture: str) -> None:
    from PIL import Image

    axes.set_axis_off()
    axes.set_anchor("N")
    axes.imshow(np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")))
