"""The benchmark of an audit, from planted noise to stored cells, tables and pages."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from counterfoil.audit.detection import METHODS
from counterfoil.audit.noise import plant
from counterfoil.audit.noise_benchmark import (
    FORMAT,
    Benchmark,
    Given,
    SelfTrained,
    read_cells,
    score_methods,
    select_images,
)
from counterfoil.audit.noise_tables import (
    by_label,
    curves,
    fill_page,
    groups,
    overview,
    rows,
    to_markdown,
    write_results,
)
from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent


def small(**train) -> SelfTrained:
    tree = {
        "model": {"name": "rvse-mlp", "embed_size": 16, "text": {"word_dim": 8}},
        "data": {"min_count": 1},
        "train": {"epochs": 1, "batch_size": 16, "device": "cpu", **train},
    }
    return SelfTrained(build_config(tree))


@pytest.fixture(scope="module")
def task(learned, concepts, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return Benchmark(concepts.test, [Given("learned", learned)], ["random"], [0.3], [0, 1], out)


@pytest.fixture(scope="module")
def cells(task):
    return task.run()


def test_every_method_is_measured_in_every_cell(cells) -> None:
    assert [(cell.noise, cell.rate, cell.seed) for cell in cells] == [
        ("random", 0.3, 0),
        ("random", 0.3, 1),
    ]
    for cell in cells:
        assert tuple(cell.methods) == METHODS
        assert 0 < cell.wrong < cell.captions
        assert cell.methods["audit"].auroc > 80


def test_a_cell_that_is_stored_is_not_measured_again(cells, task, monkeypatch) -> None:
    monkeypatch.setattr("counterfoil.audit.noise_benchmark.audit_split", None)
    assert task.run() == cells
    # another seed is another cell
    with pytest.raises(TypeError):
        Benchmark(task.split, task.sources, ["random"], [0.3], [2], task.out).run()


def test_a_cell_without_a_new_method_is_shown_and_measured_again(cells, task, tmp_path) -> None:
    old = [cell.model_copy(update={"methods": {"audit": cell.methods["audit"]}}) for cell in cells]
    write_results(tmp_path, old)
    assert [row[1] for row in rows(read_cells(tmp_path))[1:]] == ["audit"]
    again = replace(task, out=tmp_path)
    assert [cell.methods for cell in again.run()] == [cell.methods for cell in cells]
    assert [tuple(cell.methods) for cell in read_cells(tmp_path)] == [METHODS] * 2


def test_cells_of_another_format_are_refused(cells, task, tmp_path) -> None:
    old = [
        cell.model_copy(update={"settings": {**cell.settings, "format": FORMAT - 1}})
        for cell in cells
    ]
    write_results(tmp_path, old)
    expected = rf"results\.json: .*format {FORMAT - 1}, expected {FORMAT}.*measure again"
    with pytest.raises(DataError, match=expected):
        read_cells(tmp_path)
    with pytest.raises(DataError, match=expected):
        replace(task, out=tmp_path).run()
    (tmp_path / "results.json").unlink()
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.json").write_text(old[0].to_json())
    with pytest.raises(DataError, match=r"a\.json: .*delete the file"):
        read_cells(tmp_path)


def test_results_are_read_back_without_the_single_cells(cells, task, tmp_path) -> None:
    write_results(tmp_path, cells, drawn=cells)
    assert read_cells(tmp_path) == read_cells(task.out) == cells
    name = f"test-random-30-{cells[0].captions}-learned.svg"
    assert [path.name for path in tmp_path.glob("*.svg")] == [name]
    assert json.loads((tmp_path / "results.json").read_text())["cells"][0]["noise"] == "random"


def test_a_table_has_means_and_deviations_over_seeds(cells) -> None:
    (group,) = groups(cells).values()
    table = rows(group)
    assert table[0][:3] == ("model", "method", "AUROC")
    assert len(table) == 1 + len(METHODS)
    values = [cell.methods["audit"].auroc for cell in cells]
    audit = next(row for row in table if row[1] == "audit")
    assert audit[2] == f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"
    assert "2 seeds" in to_markdown(cells)


def test_the_overview_has_every_model_and_noise_once_and_marks_the_best(cells) -> None:
    later = [
        cell.model_copy(
            update={"rate": 0.1, "settings": {**cell.settings, "rate": 0.1, "one_caption": True}}
        )
        for cell in cells
    ]
    header, *table = overview([*cells, *later])
    assert set(header[2:]) == set(METHODS)
    assert [row[:2] for row in table] == [
        ("learned", "random, 30 % of test"),
        ("learned, one caption per image", "random, 10 % of test"),
    ]
    values = {
        name: np.mean([cell.methods[name].auroc for cell in cells]).round(1) for name in METHODS
    }
    for row in table:
        shown = dict(zip(header[2:], row[2:], strict=True))
        assert {name: float(text.strip("*")) for name, text in shown.items()} == values
        for labels in (False, True):
            alike = [name for name in METHODS if name.endswith("tuned on labels") == labels]
            best = max(values[name] for name in alike)
            assert all((shown[name][0] == "*") == (values[name] == best) for name in alike)


def test_a_method_that_older_cells_lack_is_a_dash_in_the_overview(cells) -> None:
    older = [
        cell.model_copy(update={"methods": {k: v for k, v in cell.methods.items() if k != "audit"}})
        for cell in cells
    ]
    header, row = overview(older)
    shown = dict(zip(header, row, strict=True))
    assert shown["audit"] == "–"
    assert sum("**" in text for text in row) >= 2


def test_cells_of_different_settings_are_no_seeds_of_each_other(cells) -> None:
    other = [
        cell.model_copy(update={"settings": {**cell.settings, "examined": 7}}) for cell in cells
    ]
    (group,) = groups([*cells, *other]).values()
    assert [(label, len(own)) for label, own in by_label(group).items()] == [
        ("learned (1)", 2),
        ("learned (2)", 2),
    ]
    table = rows(group)
    assert [row[0] for row in table[1:]] == [
        *["learned (1)"] * len(METHODS),
        *["learned (2)"] * len(METHODS),
    ]
    assert [row[1:] for row in table[1 : 1 + len(METHODS)]] == [row[1:] for row in rows(cells)[1:]]
    count = cells[0].captions
    assert list(curves(group)) == [f"test-random-30-{count}-learned-{k}" for k in (1, 2)]


def test_a_page_is_filled_between_its_marks(cells, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- audit-results -->\nold\n<!-- /audit-results -->\nafter\n")
    assert fill_page(page, cells) == 1
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert to_markdown(cells) in text
    fill_page(page, cells)
    assert page.read_text() == text
    # a line per setting and the pictures, on the same page or another one
    line = "| learned | random, 30 % of test |"
    assert line not in text
    picture = f"test-random-30-{cells[0].captions}-learned.svg"
    (tmp_path / picture).write_text("<svg/>")
    page.write_text(f"{text}<!-- audit-overview --><!-- /audit-overview -->")
    assert fill_page(page, cells, ".") == 2
    assert line in page.read_text()
    page.write_text("<!-- audit-overview --><!-- /audit-overview -->")
    assert fill_page(page, cells, ".") == 1
    assert line in page.read_text()
    assert to_markdown(cells) not in page.read_text()
    assert f"(./{picture})" in page.read_text()
    assert f"{cells[0].captions:,} captions, seed 0](" in page.read_text()
    for text in ("no marks", "<!-- audit-results --> without an end"):
        page.write_text(text)
        with pytest.raises(DataError, match="expected the mark"):
            fill_page(page, cells)
    with pytest.raises(DataError, match="no stored results"):
        fill_page(page, [])


def test_a_damaged_cell_is_named(tmp_path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.json").write_text("{")
    with pytest.raises(DataError, match=r"a\.json.*delete it"):
        read_cells(tmp_path)
    (tmp_path / "results.json").write_text('{"cells": 3}')
    with pytest.raises(DataError, match="expected a list"):
        read_cells(tmp_path)


def test_some_images_of_a_noisy_split_keep_their_marks(concepts) -> None:
    noisy = plant(concepts.test, "random", 0.3, 0)
    part = select_images(noisy, np.array([3, 7, 20]))
    captions = np.flatnonzero(np.isin(noisy.split.image_of, [3, 7, 20]))
    assert part.split.texts == [noisy.split.texts[k] for k in captions]
    np.testing.assert_array_equal(part.wrong, noisy.wrong[captions])


@pytest.mark.slow
@pytest.mark.parametrize("folds", [1, 2])
def test_a_model_trained_on_the_noise_scores_every_caption(concepts, folds) -> None:
    source = SelfTrained(small().config, folds)
    noisy = plant(concepts.test, "random", 0.3, 0)
    found = score_methods(source, noisy, 20, Silent())
    assert tuple(found) == METHODS
    for values in found.values():
        assert np.isfinite(values).all()
    if folds == 1:  # the same seed gives the same numbers
        again = score_methods(source, noisy, 20, Silent())
        np.testing.assert_array_equal(found["audit"], again["audit"])


def test_too_few_captions_for_a_batch_are_refused(concepts) -> None:
    noisy = plant(concepts.test.select(range(4)), "random", 0.5, 0)
    with pytest.raises(ConfigError, match=r"train\.batch_size=16"):
        score_methods(small(), noisy, 20, Silent())
