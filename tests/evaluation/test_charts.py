"""Charts: well-formed, escaped, and calm about what cannot be drawn."""

from __future__ import annotations

import math
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.errors import MissingExtraError
from counterfoil.evaluation import bar_chart, histogram, line_chart, save_line_chart_png
from counterfoil.evaluation.chart_axes import nice_ticks, tick_text

SVG = "{http://www.w3.org/2000/svg}"
ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)


def drawn(chart: str) -> ElementTree.Element:
    """The parsed chart; no number in it may have come out as NaN or infinite."""
    root = ElementTree.fromstring(chart)  # noqa: S314
    for mark in root.iter():
        for key, value in mark.attrib.items():
            if key in {"x", "y", "x1", "y1", "cx", "cy", "width", "height", "points"}:
                assert "nan" not in value
                assert "inf" not in value
    return root


@given(st.dictionaries(st.text("ab<&\"'é", max_size=5), st.lists(st.tuples(ANY, ANY))))
def test_a_line_chart_of_anything_is_well_formed(series):
    drawn(line_chart(series, "a <title> & more", "x", "y"))


@given(st.dictionaries(st.text("ab<&", max_size=60), ANY))
def test_a_bar_chart_of_anything_is_well_formed(values):
    drawn(bar_chart(values, "bars", "x"))


@given(st.lists(ANY), st.integers(1, 30))
def test_a_histogram_of_anything_is_well_formed(values, bins):
    drawn(histogram(values, "values", bins=bins))


def test_text_is_escaped_everywhere():
    evil = "<script>alert(1)</script>"
    charts = [
        line_chart({evil: [(0, 1)], evil * 2: [(1, 2)]}, evil, evil, evil),
        bar_chart({evil: 1.0, evil * 3: float("nan")}, evil, evil),
        histogram([1.0, 2.0], evil, evil, evil),
        line_chart({}, evil),
    ]
    for chart in charts:
        assert "<script" not in chart
        assert "&lt;script" in chart


def test_a_line_breaks_where_a_value_is_missing():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 3.0), (4, 4.0)]
    root = drawn(line_chart({"loss": points}))
    assert len(root.findall(f".//{SVG}polyline")) == 2
    assert len(root.findall(f".//{SVG}circle")) == 4


def test_several_series_have_a_legend_and_colours_of_their_own():
    root = drawn(line_chart({"one": [(0, 1), (1, 2)], "two": [(0, 2), (1, 1)]}))
    assert {"one", "two"} <= {text.text for text in root.iter(f"{SVG}text")}
    assert len({line.attrib["stroke"] for line in root.iter(f"{SVG}polyline")}) == 2


def test_higher_values_are_drawn_higher():
    root = drawn(line_chart({"up": [(0, 1.0), (1, 5.0)]}))
    first, last = root.find(f".//{SVG}polyline").attrib["points"].split()
    assert float(first.split(",")[1]) > float(last.split(",")[1])


def test_nothing_to_draw_says_so():
    for chart in (line_chart({}), line_chart({"a": []}), bar_chart({}), histogram([math.nan])):
        assert "no data" in chart


def test_every_value_of_a_histogram_is_counted_once():
    root = drawn(histogram([0.0, 0.1, 0.5, 1.0, 1.0], bins=4))
    counts = [int(title.text.split(": ")[1]) for title in root.iter(f"{SVG}title")]
    assert sum(counts) == 5


@given(
    st.floats(-1e12, 1e12),
    st.floats(1e-6, 1e12),
    st.integers(2, 12),
)
def test_ticks_enclose_the_values_evenly(low, length, count):
    high = low + length
    ticks = nice_ticks(low, high, count)
    slack = 1e-6 * (ticks[1] - ticks[0]) + 1e-9 * max(abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= count + 4


def test_labels_of_neighbouring_ticks_differ():
    for low, high in ((0, 1), (0.01, 0.0101), (490, 510), (0, 3e7), (-2.5, 2.5)):
        ticks = nice_ticks(low, high, 5)
        assert len({tick_text(tick, ticks) for tick in ticks}) == len(ticks)


def test_a_png_is_written_without_touching_pyplot(tmp_path):
    program = (
        "import sys; from counterfoil.evaluation import save_line_chart_png as save;"
        f"save({str(tmp_path / 'new' / 'a.png')!r}, {{'a$': [(0, 1), (1, float('nan'))]}}, '$t');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"counterfoil\[plots\]"):
        save_line_chart_png(tmp_path / "a.png", {"a": [(0, 1)]})


def test_importing_the_package_imports_neither_torch_nor_matplotlib():
    program = (
        "import sys, counterfoil.evaluation;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'rich')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
