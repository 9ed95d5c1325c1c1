"""Pictures of tables with measures: a panel a number, a dot a row."""

from __future__ import annotations

from counterfoil.reproduce.plots import charts_of, write_charts
from counterfoil.reproduce.present import to_markdown
from counterfoil.reproduce.results import Reproduction, RowResult, SeedResult, ShownMeasure
from counterfoil.reproduce.spread import Measure


def titles_of(chart) -> list[str]:
    return [axes.get_title("left") for axes in chart.draw().axes]


def table(**changes) -> Reproduction:
    rows = [
        RowResult(
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
        "rows": [*rows, RowResult(label=["quoted"], quoted=True)],
        "measures": [ShownMeasure(title="AUC"), ShownMeasure(title="WoD")],
    }  # fmt: skip
    return Reproduction(**{**settings, **changes})


def test_a_table_with_measures_is_drawn_as_panels(tmp_path) -> None:
    (chart,) = charts_of(table())
    assert titles_of(chart) == ["RSUM", "AUC"]  # WoD is of one row alone
    first, second = chart.draw().axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["UNITER", "TAGS"]
    assert [float(line.get_xdata()[0]) for line in first.get_lines()] == [518.0, 515.0]
    assert [float(line.get_xdata()[0]) for line in second.get_lines()] == [61.0, 73.0]
    assert [path.name for path in write_charts(table(), tmp_path)] == ["measures.svg"]
    (bare,) = charts_of(table(metrics=[]))
    assert titles_of(bare) == ["AUC"]
    (alone,) = charts_of(table(rows=table().rows[1:]))
    assert titles_of(alone) == ["RSUM", "AUC", "WoD"]
    assert charts_of(table(rows=[RowResult(label=["quoted"], quoted=True)])) == []


def test_a_table_without_measures_keeps_its_bars() -> None:
    (chart,) = charts_of(table(measures=[]))
    assert chart.name == "rsum"
    assert [bar.get_width() for bar in chart.draw().axes[0].patches] == [518.0, 515.0]


def test_a_trade_off_is_drawn_beside_the_panels() -> None:
    rows = [
        RowResult(label=[name]).with_each(
            [
                SeedResult(seed=k, recipe="", numbers={"rsum": rsum + k, "A": a, "B": a + 2 * k})
                for k in range(2)
            ]
        )
        for name, rsum, a in (("UNITER", 518.0, 61.0), ("TAGS", 515.0, 73.0))
    ]
    measures = [ShownMeasure(title="A"), ShownMeasure(title="B")]
    given = table(rows=rows, measures=measures, trade_off=["A", "B"])
    charts = charts_of(given)
    assert [chart.name for chart in charts] == ["measures", "trade-off"]
    (axes,) = charts[1].draw().axes
    named = {text.get_text(): text.xy for text in axes.texts if text.get_text()}
    assert named == {"UNITER": (518.5, 61.5), "TAGS": (515.5, 73.5)}
    # both seeds of a row change by as much: no spread, though the seeds differ
    (bars,) = [one for one in axes.containers if one.has_xerr]
    segments = bars.lines[2][0].get_segments()
    assert [list(end) for end in segments[0]] == [[515.5, 73.5], [515.5, 73.5]]
    assert len(charts_of(given.model_copy(update={"rows": rows[1:]}))) == 1
    assert len(charts_of(given.model_copy(update={"trade_off": []}))) == 1


def test_numbers_over_fewer_seeds_than_their_row_are_noted() -> None:
    assert "of 3 seeds" not in to_markdown(table())
    two = Measure(mean=61.0, std=1.0, seeds=2)
    first = table().rows[0]
    row = first.model_copy(update={"numbers": first.numbers | {"AUC": two}})
    assert "- UNITER: over 2 of 3 seeds: AUC." in to_markdown(table(rows=[row]))
