"""Tables and claims on pages: filled between their markers, and how strong a claim is."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import DataError
from counterfoil.reproduce.catalogue import labels
from counterfoil.reproduce.present import (
    NOT_RUN,
    claim_rows,
    difference,
    fill_page,
    pages_to_fill,
    to_markdown,
    verdict,
)
from counterfoil.reproduce.results import (
    Measure,
)
from counterfoil.reproduce.spec import Claim
from counterfoil.reproduce.store import (
    ResultCache,
    merged,
    read_stored,
    write_stored,
)
from tests.reproduce.conftest import planned, tiny
from tests.reproduce.test_reproduce import finish
from tests.reproduce.test_store import PAGE, result, row, table


def test_a_difference_is_taken_seed_by_seed() -> None:
    better = row("a", result(0, 10.0), result(1, 20.0), result(3, 99.0))
    worse = row("b", result(0, 8.0), result(1, 12.0), result(2, 0.0))
    results = difference(better, worse)
    assert results == Measure.over([2.0, 8.0])
    assert difference(better, row("b")) is None
    assert verdict(Measure(mean=-3.0, std=1.0, seeds=3)) == "refuted"
    assert verdict(Measure(mean=-3.0, std=1.0, seeds=3), tuned=False) == "lower, but not tuned"
    assert verdict(Measure(mean=-0.3, std=1.0, seeds=3)) == "within the spread"
    assert verdict(Measure(mean=9.0, std=1.0, seeds=2)) == "not tested: 2 seeds"
    assert verdict(None) == "not tested"


def test_claims_stand_beside_the_papers_difference() -> None:
    printed = {"f30k": [None] * 6 + [500.0]}, {"f30k": [None] * 6 + [480.5]}
    rows = (
        row("a", result(0, 10.0), published=printed[0]),
        row("b", result(0, 8.0), published=printed[1]),
    )
    claim = Claim(text="a > b", better="a", worse="b")
    results = table(*rows, claims=[claim], published_on="f30k")
    assert claim_rows(results)[1] == ("a > b", "+2.0", "", "+19.5", "not tested: 1 seed")
    alone = table(rows[0], claims=[claim], published_on="f30k")
    assert claim_rows(alone) == []  # made of some rows, and kept for when the others are there
    assert "Claim" not in to_markdown(alone)
    assert claim_rows(merged(alone, table(rows[1], claims=[claim])))[1][-1] == "not tested: 1 seed"


def test_a_page_is_filled_from_the_store_and_only_between_its_markers(out, cache, tmp_path) -> None:
    plan = planned(tiny(), out)
    ResultCache(tmp_path, plan, labels(plan.artifact)).add(finish(plan, cache))
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("tiny@scenes") + PAGE.format("other@scenes"))
    assert fill_page(page, tmp_path) == ["tiny@scenes", "other@scenes"]
    text = page.read_text()
    rsum = read_stored(tmp_path / "tiny@scenes.json").rows[0].numbers["rsum"].mean
    assert f"{rsum:.1f} (21.0)" in text
    assert "old" not in text
    assert NOT_RUN in text
    assert text.count("What it means.") == 2
    assert (tmp_path / "page" / "tiny@scenes-rsum.svg").read_text().startswith("<?xml")
    assert "(page/tiny@scenes-rsum.svg)" in text
    fill_page(page, tmp_path)
    assert page.read_text() == text


def test_the_claims_of_several_tables_stand_together(tmp_path) -> None:
    claims = [Claim(text="a > b", better="a", worse="b")]
    rows = row("a", result(0, 10.0)), row("b", result(0, 12.5))
    for name, some in (("one", rows), ("two", rows[:1]), ("three", rows[::-1])):
        results = table(*some, claims=claims).model_copy(update={"name": f"mine.{name}"})
        write_stored(tmp_path, results, f"mine.{name}@here.json")
    write_stored(tmp_path, table(*rows, claims=claims), "mine.one@elsewhere.json")
    page = tmp_path / "page.md"
    page.write_text("<!-- claims: mine.*@here -->\nold\n<!-- /claims -->\nWhat it means.\n")
    assert fill_page(page, tmp_path) == ["mine.*@here"]
    lines = page.read_text().splitlines()
    assert lines[3:5] == [
        "| mine.one | a > b | -2.5 |  |  | not tested: 1 seed |",
        "| mine.three | a > b | -2.5 |  |  | not tested: 1 seed |",
    ]
    assert lines[5:] == ["<!-- /claims -->", "What it means."]
    page.write_text("<!-- claims: other.* -->\n<!-- /claims -->\n")
    fill_page(page, tmp_path)
    assert NOT_RUN in page.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- claims: a -->\n<!-- /results -->\n", "has no end"),
        ("no markers", "to fill"),
        ("<!-- results: a@b -->\n", "has no end"),
        ("<!-- results: a@b -->\n" + PAGE.format("c@d"), "'a@b' has no end"),
    ],
)
def test_a_page_that_cannot_be_filled_says_why(tmp_path, text, message) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(DataError, match=message):
        fill_page(page, tmp_path)
    assert page.read_text() == text


def test_a_folder_of_pages_is_filled_from_the_folder_around_it(tmp_path) -> None:
    write_stored(tmp_path, table(row("a", result(0, 10.0))), "mine@here.json")
    folder = tmp_path / "pages"
    folder.mkdir()
    with pytest.raises(DataError, match="no page has a"):
        pages_to_fill(folder)
    for name in ("first", "second"):
        (folder / f"{name}.md").write_text(PAGE.format("mine@here"))
    (folder / "plain.md").write_text("no table")
    done = CliRunner().invoke(app, ["reproduce", "--render-page", str(folder)])
    assert done.exit_code == 0, done.output
    assert all("| a |" in (folder / f"{name}.md").read_text() for name in ("first", "second"))
    assert (folder / "plain.md").read_text() == "no table"
