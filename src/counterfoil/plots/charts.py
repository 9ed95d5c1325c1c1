"""Line, bar and histogram charts with matplotlib in one style, as SVG or PNG.

matplotlib is imported only when a chart is drawn. Figures are made without pyplot, which would
choose a backend for the whole process.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from counterfoil.core.printable import visible
from counterfoil.core.storage.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Parameters = ParamSpec("Parameters")
Point = tuple[float, float] | tuple[float, float, float | None]
"""x, y and, if known, the deviation of y."""

# The palette of Okabe and Ito, safe for color-blind readers, without its pale yellow.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#6A3D9A", "#4D4D4D"),
)
INK = "#1d2430"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 9.0,
    "figure.dpi": 120,
    "figure.titlesize": 10.5,
    "figure.titleweight": "bold",
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "normal",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.edgecolor": "#7d8592",
    "axes.labelcolor": INK,
    "axes.formatter.useoffset": False,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays searchable, files stay small
    "svg.hashsalt": "counterfoil",  # the same figure gives the same file
}
MAX_NAME_CHARS = 40
"""Characters of a name that fit beside an axis or in a legend."""

MAX_MARKERS = 40
"""Lines of at most this many points have a marker at each."""


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Decorate a function to draw in `STYLE`, whatever matplotlib settings the caller has."""

    @wraps(draw)
    def in_style(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def line_style(index: int) -> str:
    """Solid, then dashed and dotted after all colors are used."""
    return ("-", "--", ":")[index // len(COLORS) % 3]


def short(name: str, most: int = MAX_NAME_CHARS) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def title_lines(title: str, width: float) -> list[str]:
    """A title wrapped into lines that fit a figure of this width, in inches."""
    return textwrap.wrap(title, int(width * 10))


def title_height(title: str, width: float) -> float:
    """Height of a title at the top of a figure, in inches."""
    return 0.15 + 0.19 * len(title_lines(title, width))


def label_width(names: Sequence[str], most: int = MAX_NAME_CHARS) -> float:
    """Width of the names at the left of rows, in inches."""
    return 0.3 + 0.075 * max((len(short(name, most)) for name in names), default=0)


def new_figure(title: str, width: float, height: float) -> Figure:
    """An empty figure, its size in inches, with its title at the upper left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    if title:
        text = "\n".join(title_lines(title, width))
        figure.suptitle(text, x=0.12 / width, y=1 - 0.1 / height, ha="left", va="top")
    return figure


def place_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a position in inches from the upper left corner.

    Positions are computed, as matplotlib's own layouts draw everything several times.
    """
    across, down = figure.get_size_inches()
    bottom = down - top - height
    return figure.add_axes((left / across, bottom / down, width / across, height / down))


def new_axes(
    title: str,
    x_label: str,
    y_label: str,
    names: Sequence[str] = (),
    size: tuple[float, float] = (8.0, 4.5),
    left: float = 1.0,
) -> tuple[Figure, Axes, int]:
    """A figure with axes below its title and the legend of ``names``, and the legend's columns.

    The rows of the legend add to the height of the figure.
    """
    width, height = size
    widest = max((len(short(name)) for name in names), default=0)
    columns = max(1, int((width - left) / (0.5 + 0.073 * widest)))
    rows = math.ceil(len(names) / columns)
    top = title_height(title, width) + 0.05 + 0.2 * rows
    height += top - 0.39
    bottom = 0.55 if x_label else 0.35
    figure = new_figure(title, width, height)
    axes = place_axes(figure, left, top, width - left - 0.2, height - top - bottom)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes, columns


def add_legend(axes: Axes, columns: int) -> None:
    """Add the legend in the space that `new_axes` left above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, borderaxespad=0.1)


def show_no_data(axes: Axes) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")


@styled
def line_chart(
    series: Mapping[str, Sequence[Point]],
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    *,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """One line per series in a band of its deviations; values that are not finite are gaps.

    Each level is a dashed line with its name.

    >>> figure = line_chart({"R@1": [(0, 10.0), (1, 20.0)]}, "recall", "epoch", "%")
    >>> figure.axes[0].get_lines()[0].get_ydata().tolist()
    [10.0, 20.0]
    """
    names = list(series) if len(series) > 1 else []
    figure, axes, columns = new_axes(title, x_label, y_label, names)
    if not any(math.isfinite(_drawable(p[1])) for points in series.values() for p in points):
        show_no_data(axes)
        return figure
    for index, (name, points) in enumerate(series.items()):
        _draw_line(axes, short(name), points, {"color": color(index), "ls": line_style(index)})
    for name, level in (levels or {}).items():
        axes.axhline(level, color=INK, linestyle="--", linewidth=1.2, alpha=0.8)
        at_right_end = axes.get_yaxis_transform()
        ground = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
        axes.text(1, level, name, transform=at_right_end, ha="right", va="bottom", bbox=ground)
    if names:
        add_legend(axes, columns)
    return figure


def _draw_line(axes: Axes, name: str, points: Sequence[Point], look: dict[str, str]) -> None:
    xs, ys = [_drawable(point[0]) for point in points], [_drawable(point[1]) for point in points]
    finite = [False, *(math.isfinite(x) and math.isfinite(y) for x, y in zip(xs, ys, strict=True))]
    finite.append(False)
    alone = [i for i in range(len(xs)) if finite[i + 1] and not (finite[i] or finite[i + 2])]
    marked = None if len(points) <= MAX_MARKERS else alone
    axes.plot(xs, ys, label=name, marker="o", markersize=3.5, markevery=marked, **look)  # type: ignore[arg-type]
    spread = [(point[2] or 0.0) if len(point) == 3 else 0.0 for point in points]
    if any(spread):
        low, high = ([y + side * s for y, s in zip(ys, spread, strict=True)] for side in (-1, 1))
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _drawable(value: float) -> float:
    """The value, or NaN if it is too large for the length of an axis to be finite."""
    return float(value) if abs(value) < 1e300 else math.nan


@styled
def bar_chart(values: Mapping[str, float], title: str = "", x_label: str = "") -> Figure:
    """One horizontal bar per name, with its value; bars below zero go to the left.

    >>> [float(bar.get_width()) for bar in bar_chart({"R@1": 52.0, "R@10": 91.5}).axes[0].patches]
    [52.0, 91.5]
    """
    size = 8.0, 0.9 + 0.3 * max(2, len(values))
    figure, axes, _ = new_axes(title, x_label, "", size=size, left=label_width(list(values)))
    widths = [_drawable(value) for value in values.values()]
    if not any(map(math.isfinite, widths)):
        show_no_data(axes)
        return figure
    name_rows(axes, list(values))
    lengths = [0.0 if math.isnan(width) else width for width in widths]
    bars = axes.barh(range(len(values)), lengths, 0.7, color=COLORS[0])
    texts = ["no value" if math.isnan(width) else f"{width:.4g}" for width in widths]
    axes.bar_label(bars, texts, padding=4)
    axes.margins(x=0.13)
    return figure


@styled
def histogram(
    values: Sequence[float],
    title: str = "",
    x_label: str = "",
    y_label: str = "count",
    *,
    bins: int = 20,
) -> Figure:
    """Counts of values in equal bins; values that are not finite are ignored.

    >>> [float(bar.get_height()) for bar in histogram([1.0, 2.0, 2.5], bins=2).axes[0].patches]
    [1.0, 2.0]
    """
    figure, axes, _ = new_axes(title, x_label, y_label, size=(8.0, 4.0))
    finite = [value for value in map(_drawable, values) if math.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-280):  # too close for bins
            low, high = low - (0.1 * abs(low) or 0.5), high + (0.1 * abs(high) or 0.5)
        axes.hist(finite, bins=bins, range=(low, high), color=COLORS[0], edgecolor="white")
    else:
        show_no_data(axes)
    return figure


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names at the left of rows 0, 1, … from the top down, over a vertical grid."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


def to_svg(figure: Figure) -> str:
    """An SVG document; the same figure always gives the same text."""
    metadata = {"Date": None, "Creator": None, "Title": figure.get_suptitle() or "chart"}
    return visible(_save_bytes(figure, "svg", metadata).decode())


def to_png(figure: Figure) -> bytes:
    return _save_bytes(figure, "png", {"Software": None})


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write a figure as SVG if the path ends in ``.svg``, else as PNG."""
    path = Path(path)
    write_atomically(path, to_svg(figure) if path.suffix == ".svg" else to_png(figure))
    return path


def _save_bytes(figure: Figure, form: str, metadata: Mapping[str, str | None]) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()
