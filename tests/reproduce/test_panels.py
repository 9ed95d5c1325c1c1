"""Pictures of tables with measures: a panel a number, a dot a row."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.evaluation.chart_marks import document
from counterfoil.reproduce.panel_chart import WIDTH, Dot, Panel, panel_chart
from counterfoil.reproduce.plots import charts_of, to_svg, write_charts
from counterfoil.reproduce.results import Found, Measure, Reproduction, ShownMeasure

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(-1e4, 1e4, allow_nan=False)
DOTS = st.none() | st.builds(Dot, NUMBERS, st.none() | st.floats(0, 100))


def drawn(svg: str, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f"{SVG}{name}")  # noqa: S314 - our own


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(DOTS, min_size=n, max_size=n))))
def test_every_dot_lies_inside_the_picture(rows) -> None:
    names = [f"row {number}" for number in range(len(rows[0]) if rows else 3)]
    rows = [dots for dots in rows if any(dots)]
    svg = panel_chart(names, [Panel(f"number {k}", dots) for k, dots in enumerate(rows)], "title")
    assert len(drawn(svg, "circle")) == sum(dot is not None for dots in rows for dot in dots)
    _, _, width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split())  # noqa: S314
    for dot in drawn(svg, "circle"):
        assert 0 < float(dot.attrib["cx"]) < width
        assert 0 < float(dot.attrib["cy"]) < height


def test_higher_numbers_are_further_right_and_each_panel_has_its_own_range() -> None:
    panels = [Panel("RSUM", [Dot(514.0), Dot(518.0)]), Panel("AUC", [Dot(0.9), Dot(0.8)])]
    first, second, third, fourth = (
        float(dot.attrib["cx"]) for dot in drawn(panel_chart(["a", "b"], panels), "circle")
    )
    assert first + 50 < second
    assert fourth + 50 < third


@pytest.mark.parametrize(("length", "lines"), [(60, 1), (120, 2), (300, 3)])
def test_a_title_that_is_too_long_is_wrapped_above_the_picture(length, lines) -> None:
    title = ("words and " * length)[:length].strip()
    svg = document(title, WIDTH, 100, ["<circle/>"])
    texts = drawn(svg, "text")
    assert len(texts) == lines
    assert " ".join(text.text or "" for text in texts) == title
    top, height = (float(ElementTree.fromstring(svg).attrib["viewBox"].split()[k]) for k in (1, 3))  # noqa: S314
    assert top + height == 100
    assert all(top < float(text.attrib["y"]) for text in texts)
    assert re.findall(r'aria-label="([^"]*)"', svg) == [title]


def table(**changes) -> Reproduction:
    rows = [
        Found(
            label=[name], numbers={key: Measure(mean=value, std=1.0, seeds=3) for key, value in of}
        )
        for name, of in [
            ("UNITER", [("rsum", 518.0), ("AUC", 61.0)]),
            ("TAGS", [("rsum", 515.0), ("AUC", 73.0), ("WoD", 87.0)]),
        ]
    ]
    settings = {
        "name": "t", "kind": "table", "title": "T", "paper": "p", "data": "scenes", "scale": "full",
        "seeds": 3, "overrides": [], "columns": ["Model"], "metrics": ["rsum"],
        "rows": [*rows, Found(label=["quoted"], quoted=True)],
        "measures": [ShownMeasure(title="AUC"), ShownMeasure(title="WoD")],
    }  # fmt: skip
    return Reproduction(**{**settings, **changes})


def test_a_table_with_measures_is_drawn_as_panels(tmp_path) -> None:
    (chart,) = charts_of(table())
    assert chart.names == ["UNITER", "TAGS"]
    assert [panel.title for panel in chart.panels] == ["RSUM", "AUC"]  # WoD is of one row alone
    assert len(drawn(to_svg(chart), "circle")) == 4
    assert [path.name for path in write_charts(table(), tmp_path)] == ["measures.svg"]
    (bare,) = charts_of(table(metrics=[]))
    assert [panel.title for panel in bare.panels] == ["AUC"]
    (alone,) = charts_of(table(rows=table().rows[1:]))
    assert [panel.title for panel in alone.panels] == ["RSUM", "AUC", "WoD"]
    assert charts_of(table(rows=[Found(label=["quoted"], quoted=True)])) == []


def test_a_table_without_measures_keeps_its_bars() -> None:
    (chart,) = charts_of(table(measures=[]))
    assert (chart.kind, chart.name) == ("bars", "rsum")
