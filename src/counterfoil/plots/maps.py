"""Scatter plots, similarity densities, word-region heat maps and sheets of examples."""

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
    label_width,
    new_axes,
    new_figure,
    place_axes,
    short,
    show_no_data,
    styled,
    title_height,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_LARGE_POINTS = 10
"""Groups of at most this many points are drawn larger, as the others are compared with them."""

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
    """One dot per point; small groups are drawn larger and above the others.

    ``diagonal`` draws x = y over the common range of both axes.
    """
    figure, axes, columns = new_axes(title, x_label, y_label, list(groups), (8.0, 5.6))
    all_points = [point for points in groups.values() for point in points]
    if not all_points:
        show_no_data(axes)
        return figure
    for index, (name, points) in enumerate(groups.items()):
        few = len(points) <= MAX_LARGE_POINTS
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=60 if few else 10,
            alpha=1.0 if few else 0.6,
            color=color(index),
            edgecolors="white" if few else "none",
            label=short(name),
            zorder=3 if few else 2,
        )
    low, high = np.min(all_points, axis=0).max(), np.max(all_points, axis=0).min()
    if diagonal and low < high:
        axes.plot([low, high], [low, high], "--", color=INK, linewidth=1.2, alpha=0.7)
    add_legend(axes, columns)
    return figure


@dataclass(frozen=True)
class DensityPanel:
    """Counts of similarities per kind in equal bins, their mean and deviation, and the boundary."""

    title: str
    low: float
    high: float
    counts: Mapping[str, Sequence[int]]
    normals: Mapping[str, tuple[float, float]]
    boundary: float


@styled
def density_grid(title: str, lines: Sequence[Sequence[DensityPanel | None]]) -> Figure:
    """Histograms of area one, normals with the same moments, and the boundary as a dashed line.

    All panels share one x range; None leaves a panel empty.
    """
    columns = max(map(len, lines))
    width = 3.7 * columns + 0.2
    top = title_height(title, width) + 0.25
    figure = new_figure(title, width, top + 2.5 * len(lines))
    panels = [panel for line in lines for panel in line if panel is not None]
    low = min(min(panel.low, panel.boundary) for panel in panels)
    high = max(max(panel.high, panel.boundary) for panel in panels)
    legend: dict[str, Artist] = {}  # one entry per label
    for row, line in enumerate(lines):
        for column, panel in enumerate(line):
            if panel is not None:
                axes = place_axes(figure, 0.2 + 3.7 * column, top + 2.5 * row + 0.55, 3.4, 1.6)
                _draw_densities(axes, panel)
                axes.set_xlim(low, high)
                handles, labels = axes.get_legend_handles_labels()
                legend |= zip(labels, handles, strict=True)
    upper = 1 - (top - 0.25) / figure.get_size_inches()[1]
    position = {"loc": "upper left", "bbox_to_anchor": (0, upper), "fontsize": 8}
    figure.legend(list(legend.values()), list(legend), ncols=5 if columns > 1 else 2, **position)
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
    """Heat maps, one column per model: red speaks for a match, blue against it."""
    columns = max(len(pair.maps) for pair in pairs)
    left = label_width([word for pair in pairs for word in pair.words], 18)
    across = left + 5.3
    top = title_height(title, across * columns)
    heights = [1.45 + 0.2 * len(pair.words) for pair in pairs]
    figure = new_figure(title, across * columns, top + sum(heights))
    for pair, height in zip(pairs, heights, strict=True):
        for column, (name, values) in enumerate(pair.maps):
            size = 4.4, height - 1.45
            axes = place_axes(figure, column * across + left, top + 0.45, *size)
            scale = place_axes(figure, column * across + left + 4.5, top + 0.45, 0.12, size[1])
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
class SheetWord:
    """A word of an example, whether it is new, and its probability of being wrong, if known."""

    text: str
    new: bool
    wrong: float | None


@dataclass(frozen=True)
class SheetExample:
    """An image (base64 of a JPEG file, or empty) and sentences with their headings."""

    name: str
    picture: str
    sentences: Sequence[tuple[str, Sequence[SheetWord]]]


WIDTH, LEFT, LINE = 9.0, 2.5, 0.27


@styled
def example_sheet(title: str, examples: Sequence[SheetExample]) -> Figure:
    """One block per example: its picture and its sentences.

    New words are bold. The background of a word goes from green (right) to yellow (wrong) with its
    probability of being wrong, as in the paper.
    """
    blocks = [[(head, _lines_of(words)) for head, words in one.sentences] for one in examples]
    needed = [sum(LINE * (1.2 + len(lines)) for _, lines in block) for block in blocks]
    heights = [max(2.4, height + 0.3) for height in needed]
    top = title_height(title, WIDTH) + 0.1
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


def _lines_of(words: Sequence[SheetWord]) -> list[list[tuple[float, SheetWord]]]:
    """Words with their x positions, wrapped into lines."""
    lines: list[list[tuple[float, SheetWord]]] = [[]]
    x = LEFT
    for word in words:
        wide = _width(word) + 0.12
        if x + wide > WIDTH - 0.2 and lines[-1]:
            lines.append([])
            x = LEFT
        lines[-1].append((x, word))
        x += wide
    return lines


def _width(word: SheetWord) -> float:
    """Width of a drawn word, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    face = FontProperties(family="DejaVu Sans", weight="bold" if word.new else "normal")
    path = TextPath((0, 0), word.text.replace("$", "S"), size=9.5, prop=face)
    return float(path.get_extents().x1) / 72 if len(path.vertices) else 0.05


def _draw_word(page: Axes, x: float, y: float, word: SheetWord) -> None:
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
