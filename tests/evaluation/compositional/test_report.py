"""Reports: values per file and over files, what is missing, and every form of output."""

from __future__ import annotations

import json

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.evaluation.compositional.accuracy import Scored
from counterfoil.evaluation.compositional.blind import BlindScorer
from counterfoil.evaluation.compositional.readers import Benchmark, Item, Subset, read_benchmark
from counterfoil.evaluation.compositional.report import BenchmarkReport, evaluate_benchmark
from tests.evaluation.compositional.small_files import write, write_results


class Given:
    """Scores that the test states; None for an item without its image."""

    def __init__(self, scores: dict[str, list[tuple[float, float] | None]]) -> None:
        self.scores = scores

    def score(self, subset: Subset) -> dict[str, list[Scored | None]]:
        own = self.scores[subset.name]
        return {"given": [None if one is None else Scored(np.array([one])) for one in own]}


def items(count: int) -> tuple[Item, ...]:
    return tuple(Item(str(n), (f"{n}.png",), ("a dog",), ("a big dog",)) for n in range(count))


BENCHMARK = Benchmark(
    "sugarcrepe", (Subset("one", "choice", items(2)), Subset("two", "choice", items(4)))
)
RIGHT, WRONG = (1.0, 0.0), (0.0, 1.0)


def test_the_mean_over_files_weighs_each_file_once() -> None:
    scorer = Given({"one": [RIGHT, RIGHT], "two": [RIGHT, WRONG, WRONG, WRONG]})
    report = evaluate_benchmark(BENCHMARK, [scorer, BlindScorer()], bootstrap=20)
    values = [subset.values["given"]["accuracy"].value for subset in report.subsets]
    assert values == [100.0, 25.0]
    assert report.means["given"]["accuracy"].value == 62.5
    assert report.means["shorter caption"]["accuracy"].value == 100.0
    assert report.means["chance"]["accuracy"].value == 50.0
    low, high = report.means["given"]["accuracy"].interval or (0, 0)
    assert low <= 62.5 <= high


def test_items_without_images_are_left_out_of_every_row_and_counted() -> None:
    scorer = Given({"one": [RIGHT, None], "two": [None, WRONG, RIGHT, WRONG]})
    missing = {f"{n}.png": "not found" for n in range(7)}
    report = evaluate_benchmark(BENCHMARK, [scorer, BlindScorer()], missing=[missing], bootstrap=0)
    assert [(subset.items, subset.left_out) for subset in report.subsets] == [(1, 1), (3, 1)]
    assert report.subsets[1].values["given"]["accuracy"].value == pytest.approx(100 / 3)
    notes = "\n".join(report.footnotes())
    assert "7 images are missing" in notes
    assert "(0.png: not found; 1.png: not found; 2.png: not found; " in notes
    assert "4.png: not found; …)" in notes
    assert "2 items are left out" in notes


def test_no_image_at_all_is_an_error_that_says_so() -> None:
    scorer = Given({"one": [None] * 2, "two": [None] * 4})
    with pytest.raises(DataError, match=r"none of its 1 images could be read \(x.png: a b\)"):
        evaluate_benchmark(BENCHMARK, [scorer], missing=[{"x.png": "a\n b"}])


def test_a_file_whose_images_are_all_missing_stays_with_0_items() -> None:
    scorer = Given({"one": [RIGHT, WRONG], "two": [None] * 4})
    missing = {"2.png": "not an image"}
    report = evaluate_benchmark(BENCHMARK, [scorer, BlindScorer()], missing=[missing], bootstrap=9)
    assert [(one.name, one.items, one.left_out) for one in report.subsets] == [
        ("one", 2, 0),
        ("two", 0, 4),
    ]
    ((_, rows),) = report.tables()
    assert rows[2] == ("two", "0", *["–"] * (len(rows[0]) - 2))
    assert rows[3][1:3] == ("2", rows[1][2])
    notes = "\n".join(report.footnotes())
    assert "(2.png: not an image): 4 items are left out" in notes
    assert "no item of two could be scored: means are over 1 of 2 parts" in notes
    assert BenchmarkReport.from_json(report.to_json()).subsets[1].items == 0
    titles = [axes.get_title(loc="left") for axes in report.chart().axes]
    assert titles == ["one", "two: 0 items"]


def test_a_file_of_its_own_form_without_images_has_a_table_of_dashes() -> None:
    squares = tuple(Item(str(n), ("a.png", "b.png"), ("a", "b")) for n in range(2))
    benchmark = Benchmark("scenes", (BENCHMARK.subsets[0], Subset("crossed", "square", squares)))
    scorer = Given({"one": [RIGHT, WRONG], "crossed": [None, None]})
    report = evaluate_benchmark(benchmark, [scorer], missing=[{"a.png": "gone"}], bootstrap=0)
    title, rows = report.tables()[1]
    assert (title, rows[0]) == ("crossed", ("0 items", "text", "image", "group"))
    assert rows[1:] == [("given", "–", "–", "–"), ("chance", "–", "–", "–")]


def test_reports_survive_json_and_become_tables() -> None:
    scorer = Given({"one": [RIGHT, RIGHT], "two": [RIGHT, WRONG, WRONG, WRONG]})
    report = evaluate_benchmark(BENCHMARK, [scorer], bootstrap=10, language_model="4-gram")
    assert BenchmarkReport.from_json(report.to_json()) == report
    assert json.loads(json.dumps(report.as_dict()))["benchmark"] == "sugarcrepe"
    ((title, rows),) = report.tables()
    assert title == "accuracy"
    assert [row[0] for row in rows] == ["part", "one", "two", "mean"]
    assert rows[1][2].startswith("100.00 [")
    assert "| one | 2 | 100.00 [100.0, 100.0] | 50.00 |" in report.to_markdown()
    assert "- 4-gram" in report.to_markdown()


def test_published_results_stand_beside_blind_scores(tmp_path) -> None:
    benchmark = read_benchmark("bivlc", [write_results(tmp_path)])
    report = evaluate_benchmark(benchmark, [BlindScorer()], bootstrap=0)
    ((title, rows),) = report.tables()
    assert (title, rows[0]) == ("results", ("4 items", "text", "image", "group"))
    assert rows[1] == ("stored results", "50.00", "50.00", "25.00")
    assert rows[2] == ("shorter caption", "0.00", "0.00", "0.00")
    assert rows[-1] == ("chance", "25.00", "25.00", "16.67")


@pytest.mark.parametrize("name", ["swap_obj.json", "cola.json", "hat.json"])
def test_every_form_has_a_chart(tmp_path, name) -> None:
    from tests.evaluation.compositional.small_files import TREES

    benchmark = read_benchmark(TREES[name][0], [write(tmp_path, name)])
    report = evaluate_benchmark(benchmark, [BlindScorer()], bootstrap=5)
    figure = report.chart()
    # lengths say nothing about single words
    metrics = {"swap_obj.json": 1, "cola.json": 3, "hat.json": 1}
    assert len(figure.axes) == metrics[name]


def test_a_metric_that_no_scorer_has_gets_no_table(tmp_path) -> None:
    benchmark = read_benchmark("sugarcrepe++", [write(tmp_path, "swap_obj_pp.json")])
    report = evaluate_benchmark(benchmark, [BlindScorer()], bootstrap=0)
    ((_, rows),) = report.tables()
    assert rows[0] == ("2 items", "image-text")
