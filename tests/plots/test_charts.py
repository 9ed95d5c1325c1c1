"""Charts: what is drawn, by its figure; well-formed files, and calm about what cannot be drawn."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.plots.charts import bar_chart, histogram, line_chart, save_figure, to_png, to_svg
from counterfoil.plots.comparison import (
    Dot,
    Mark,
    Pair,
    Panel,
    TradeOff,
    pair_chart,
    panel_chart,
    point_chart,
    trade_off_chart,
)
from counterfoil.plots.maps import (
    DensityPanel,
    SheetExample,
    SheetWord,
    WordMaps,
    density_grid,
    example_sheet,
    plane_chart,
    word_maps,
)

NUMBERS = st.floats(-1e4, 1e4, allow_nan=False)
DOTS = st.none() | st.builds(Dot, NUMBERS, st.none() | st.floats(0, 100))
EVIL = "<script>alert(1)</script> $a$ \x07"


def texts_of(figure) -> list[str]:
    """All texts of the SVG file, which must be well-formed."""
    root = ElementTree.fromstring(to_svg(figure))  # noqa: S314 - our own
    return ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]


def legend_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize(
    "values",
    [
        [5e-324],
        pytest.param([0.0, 5e-324], marks=pytest.mark.slow),
        pytest.param([1.0, 1.0 + 2e-16], marks=pytest.mark.slow),
        pytest.param([-1e299, 1e299], marks=pytest.mark.slow),
        [1e308, 2.0, -math.inf, math.nan],
        pytest.param([math.nan, 0.0], marks=pytest.mark.slow),
        pytest.param([1e-7, 3e-7], marks=pytest.mark.slow),
    ],
)
def test_charts_of_extreme_values_are_well_formed(values) -> None:
    texts_of(line_chart({"a": list(zip(values, values, strict=True))}, "T", "x", "y"))
    texts_of(bar_chart({f"row {n}": value for n, value in enumerate(values)}, "T", "x"))
    texts_of(histogram(values, "T"))


def test_text_of_strangers_is_text_and_never_markup_or_a_formula() -> None:
    word = SheetWord(EVIL, new=True, wrong=0.5)
    for figure in (
        line_chart({EVIL: [(0, 1)], "b": [(1, 2)]}, EVIL, EVIL, EVIL),
        bar_chart({EVIL: 1.0, "b": math.nan}, EVIL, EVIL),
        point_chart([Mark(1, 2, name=EVIL)], EVIL),
        word_maps(EVIL, [WordMaps(EVIL, [EVIL], [EVIL], [(EVIL, [[1.0]])])]),
        example_sheet(EVIL, [SheetExample(EVIL, "", [(EVIL, [word])])]),
    ):
        svg = to_svg(figure)
        assert "<script" not in svg
        assert "&lt;script" in svg
        assert any("$a$ \N{REPLACEMENT CHARACTER}" in text for text in texts_of(figure))


def test_a_line_has_gaps_where_values_are_missing_and_a_marker_at_a_lone_point() -> None:
    points = [(x, float(x)) for x in range(50)] + [(50, math.nan), (51, 3.0), (52, math.inf)]
    (line,) = line_chart({"loss": points}).axes[0].get_lines()
    assert np.isnan(line.get_ydata()).nonzero()[0].tolist() == [50, 52]
    assert line.get_markevery() == [51]
    (short,) = line_chart({"loss": points[:3]}).axes[0].get_lines()
    assert short.get_markevery() is None
    assert short.get_marker() == "o"


def test_several_series_have_a_legend_and_colors_of_their_own() -> None:
    (axes,) = line_chart({"one": [(0, 1), (1, 2)], "two": [(0, 2), (1, 1)]}).axes
    assert legend_of(axes) == ["one", "two"]
    assert len({line.get_color() for line in axes.get_lines()}) == 2
    (alone,) = line_chart({"one": [(0, 1), (1, 2)]}).axes
    assert alone.get_legend() is None


def test_deviations_are_a_band_around_their_line() -> None:
    (axes,) = line_chart({"a": [(0, 1.0, 0.5), (1, 2.0, None), (2, 3.0, 1.0)]}).axes
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.5, 4.0)
    assert not line_chart({"a": [(0, 1.0), (1, 2.0)]}).axes[0].collections


def test_a_level_is_a_dashed_line_with_its_name() -> None:
    (axes,) = line_chart({"a": [(0, 1.0), (1, 2.0)]}, levels={"chance": 1.5}).axes
    (dashed,) = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert set(dashed.get_ydata()) == {1.5}
    assert "chance" in [text.get_text() for text in axes.texts]


def test_nothing_to_draw_says_so() -> None:
    for figure in (
        line_chart({}),
        line_chart({"a": [(0, math.nan)]}),
        bar_chart({}),
        histogram([math.nan]),
        pair_chart([]),
        panel_chart(["a"], [Panel("x", [None])]),
        point_chart([]),
        plane_chart({"a": []}, diagonal=True),
    ):
        assert texts_of(figure) == ["no data"]


def test_bars_say_their_values_and_missing_ones_that_they_are() -> None:
    (axes,) = bar_chart({"a": 1.5, "b": -2.0, "c": math.nan}).axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, -2.0, 0.0]
    assert [text.get_text() for text in axes.texts] == ["1.5", "-2", "no value"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]


def test_every_value_of_a_histogram_is_counted_once() -> None:
    (axes,) = histogram([0.0, 0.1, 0.5, 1.0, 1.0, math.nan], bins=4).axes
    assert [bar.get_height() for bar in axes.patches] == [2, 0, 1, 2]


@pytest.mark.parametrize(("length", "lines"), [(60, 1), (120, 2), (300, 4)])
def test_a_title_that_is_too_long_is_wrapped_above_the_axes(length, lines) -> None:
    title = ("words and " * length)[:length].strip()
    figure = line_chart({"a": [(0, 1.0)]}, title)
    wrapped = figure.get_suptitle().split("\n")
    assert len(wrapped) == lines
    assert " ".join(wrapped) == title
    figure.draw_without_rendering()
    title_box = figure._suptitle.get_window_extent()
    assert title_box.y0 > figure.axes[0].get_window_extent().y1
    assert title_box.x1 < figure.bbox.x1


def test_a_row_has_our_bar_with_its_deviation_above_the_papers() -> None:
    pairs = [Pair("HN", 480.0, 2.0, 484.6), Pair("NAAF", None, None, 513.2)]
    (axes,) = pair_chart(pairs, "T", ("ours", "theirs")).axes
    ours, theirs, alone = axes.patches
    assert [bar.get_width() for bar in (ours, theirs, alone)] == [480.0, 484.6, 513.2]
    assert ours.get_y() < theirs.get_y() < alone.get_y()
    assert axes.get_ylim() == (1.5, -0.5)  # the first row is the uppermost
    assert {"480.0", "484.6", "513.2"} == {text.get_text() for text in axes.texts}
    assert legend_of(axes) == ["ours", "theirs"]
    (deviation,) = axes.collections
    assert deviation.get_segments()[0][:, 0].tolist() == [478.0, 482.0]


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(DOTS, min_size=n, max_size=n))))
def test_every_dot_lies_inside_its_panel_and_every_panel_inside_the_figure(rows) -> None:
    names = [f"row {number}" for number in range(len(rows[0]) if rows else 3)]
    rows = [dots for dots in rows if any(dots)]
    figure = panel_chart(names, [Panel(f"number {k}", dots) for k, dots in enumerate(rows)], "T")
    for axes, dots in zip(figure.axes, rows, strict=bool(rows)):
        places = [tuple(map(float, np.ravel(line.get_data()))) for line in axes.get_lines()]
        expected = [(dot.mean, row) for row, dot in enumerate(dots) if dot is not None]
        assert places == expected
        low, high = axes.get_xlim()
        assert all(low < x < high for x, _ in places)
        box = axes.get_window_extent()
        assert figure.bbox.x0 < box.x0 < box.x1 < figure.bbox.x1
        assert figure.bbox.y0 < box.y0 < box.y1 < figure.bbox.y1


def test_points_are_joined_line_by_line_in_order_of_x() -> None:
    marks = [Mark(2, 5.0, line="A"), Mark(1, 4.0, 0.5, line="A"), Mark(1, 3.0, line="B")]
    (axes,) = point_chart(marks, "T", "x", "y").axes
    first, second = axes.containers
    assert first.lines[0].get_data()[1].tolist() == [4.0, 5.0]
    assert second.lines[0].get_data()[1].tolist() == [3.0]
    assert first.lines[2][0].get_segments()[0][:, 1].tolist() == [3.5, 4.5]
    assert legend_of(axes) == ["A", "B"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2"]


def test_zero_on_a_logarithmic_axis_is_a_decade_below_the_smallest_value() -> None:
    marks = [Mark(x, 1.0) for x in (0.0, 0.02, 0.2)]
    (axes,) = point_chart(marks, log=True).axes
    zero, first, second = (axes.transData.transform((mark.x, 1.0))[0] for mark in marks)
    assert first - zero == pytest.approx(second - first, rel=0.15)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.02", "0.2"]


def test_named_points_are_named_towards_the_middle() -> None:
    marks = [Mark(2, 1.0, name="slow"), Mark(900, 2.0, name="fast")]
    (axes,) = point_chart(marks, log=True, joined=False).axes
    assert [(text.get_text(), text.get_ha()) for text in axes.texts] == [
        ("slow", "left"), ("fast", "right"),
    ]  # fmt: skip
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "10", "100", "1000"]


def test_the_diagonal_of_a_plane_lies_where_both_axes_have_values() -> None:
    groups = {"a": [(0.0, 1.0), (2.0, 3.0)], "b": [(1.0, 0.5)]}
    (axes,) = plane_chart(groups, "T", diagonal=True).axes
    assert [len(group.get_offsets()) for group in axes.collections] == [2, 1]
    (diagonal,) = axes.get_lines()
    assert diagonal.get_data()[0].tolist() == diagonal.get_data()[1].tolist() == [0.5, 2.0]
    (bare,) = plane_chart({"a": [(0.0, 9.0)]}, diagonal=True).axes
    assert not bare.get_lines()


def test_densities_have_an_area_of_one_and_at_most_sixty_bars() -> None:
    counts = {"matched": list(range(100)), "mismatched": [3, 1]}
    normals = {"matched": (0.4, 0.1), "mismatched": (0.1, 0.2)}
    panel = DensityPanel("a", 0.0, 0.5, counts, normals, 0.7)
    (axes,) = density_grid("T", [[panel, None]]).axes
    for bars in axes.patches:
        heights, edges, _ = bars.get_data()
        assert len(heights) <= 60
        assert (heights * np.diff(edges)).sum() == pytest.approx(1.0)
    *curves, boundary = axes.get_lines()
    assert len(curves) == 2
    assert curves[0].get_xdata()[curves[0].get_ydata().argmax()] == pytest.approx(0.4)
    assert set(boundary.get_xdata()) == {0.7}
    assert axes.get_xlim() == (0.0, 0.7)


def test_a_map_of_words_has_its_names_and_zero_in_the_middle_of_its_colors() -> None:
    values = [[-0.1, 0.2, 0.0], [0.0, 0.1, 0.1]]
    empty = WordMaps("without regions", ["a", "dog"], [], [("m", [[], []])])
    pair = WordMaps("own", ["a", "dog"], ["1", "2 red dog", "3"], [("m: s − t", values)])
    figure = word_maps("caption", [pair, empty])
    axes, *_ = figure.axes
    (mesh,) = axes.collections
    assert mesh.get_array().tolist() == values
    assert mesh.get_clim() == (-0.2, 0.2)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "dog"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2 red dog", "3"]
    assert axes.yaxis_inverted()  # the first word is the uppermost
    assert "m: s − t" in axes.get_title("left")
    assert len(texts_of(figure)) > 8


def test_words_of_an_example_stay_apart_and_inside_the_sheet() -> None:
    words = [SheetWord(f"word{n}" * (1 + n % 3), n % 4 == 0, n / 40) for n in range(40)]
    figure = example_sheet("T", [SheetExample("image", "", [("positive: 0.9", words)])])
    figure.draw_without_rendering()
    shown = {text.get_text(): text for text in figure.axes[0].texts}
    boxes = [shown[word.text].get_bbox_patch().get_window_extent() for word in words]
    for before, after in pairwise(boxes):
        assert before.x1 <= after.x0 + 0.5 or before.y0 >= after.y1 - 1
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert [shown[word.text].get_weight() for word in words[:2]] == ["bold", "normal"]


def test_the_same_figure_is_the_same_file(tmp_path) -> None:
    def draw():
        return line_chart({"a": [(0, 1), (1, 2)], "b": [(0, 2)]}, "T", "x", "y", levels={"l": 1.0})

    assert to_svg(draw()) == to_svg(draw())
    assert to_png(draw()) == to_png(draw())
    svg = save_figure(draw(), tmp_path / "new" / "a.svg").read_text()
    assert "<title>T</title>" in svg
    assert "date" not in svg
    assert save_figure(draw(), tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_leaves_the_settings_of_matplotlib_and_pyplot_alone() -> None:
    program = (
        "import sys, matplotlib; from counterfoil.plots.charts import line_chart, to_png;"
        "before = matplotlib.rcParams['font.size'];"
        "to_png(line_chart({'a': [(0, 1)]}));"
        "assert matplotlib.rcParams['font.size'] == before;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_the_package_imports_neither_torch_nor_matplotlib() -> None:
    program = (
        "import sys, counterfoil, counterfoil.evaluation, counterfoil.plots.maps,"
        " counterfoil.plots.comparison;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'rich')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_trade_off_has_an_arrow_from_the_start_to_each_other_point() -> None:
    points = [TradeOff("start", 300.0, 60.0), TradeOff("a", 290.0, 70.0, 2.0, 1.0)]
    points.append(TradeOff("b", 305.0, 55.0))
    axes = trade_off_chart(points, "a title").axes[0]
    arrows = [text for text in axes.texts if text.arrow_patch is not None]
    assert [arrow.xy for arrow in arrows] == [(290.0, 70.0), (305.0, 55.0)]
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["start", "a", "b"]
    assert trade_off_chart([]).axes


def test_a_trade_off_joins_the_points_of_one_name_from_the_start_on() -> None:
    points = [
        TradeOff("start", 300.0, 60.0),
        TradeOff("a", 298.0, 65.0),
        TradeOff("b", 290.0, 61.0),
    ]
    points.append(TradeOff("a", 280.0, 75.0))
    axes = trade_off_chart(points).axes[0]
    joined = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in joined] == [[300.0, 298.0, 280.0]]
    assert [list(line.get_ydata()) for line in joined] == [[60.0, 65.0, 75.0]]
    named = {text.get_text(): text.xy for text in axes.texts if text.get_text()}
    assert named == {"start": (300.0, 60.0), "a": (280.0, 75.0), "b": (290.0, 61.0)}


def test_many_names_of_a_trade_off_are_listed_above_it() -> None:
    points = [TradeOff(f"way {number}", 300.0 - number, 60.0 + number) for number in range(9)]
    axes = trade_off_chart(points).axes[0]
    assert not [text for text in axes.texts if text.get_text()]
    listed = [text.get_text() for text in axes.get_legend().get_texts()]
    assert listed == [point.name for point in points]
