"""Lists on a terminal and in a pipe; JSON."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import counterfoil.cli
from counterfoil.cli.evaluate import Evaluation, show, show_comparison
from counterfoil.cli.evaluate_foils import _show as show_foils
from counterfoil.cli.output import print_json, print_list
from counterfoil.evaluation.foils.report import FoilReport
from counterfoil.evaluation.report import Comparison, RunResult
from counterfoil.evaluation.retrieval import retrieval

LONG = [["short", "one line"], ["much-longer-name", "a description of many words " * 8]]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_valid_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", stream)
    print_json({"caption": "café 🐶"})
    stream.flush()
    assert json.loads(raw.getvalue().decode(encoding)) == {"caption": "café 🐶"}


@pytest.mark.parametrize("columns", [80, 100])
def test_a_list_fits_the_window_of_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    print_list(["name", "description"], LONG)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns
    assert len(lines) > 1 + len(LONG)
    assert " ".join(" ".join(lines).split()).count("a description of many words") == 8


def test_a_list_has_one_line_per_row_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_list(["name", "description"], LONG, title="kind")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "kind"
    assert [line.split("  ")[0] for line in lines] == ["short", "much-longer-name"]
    assert all(line.index(row[1][:8]) == 18 for line, row in zip(lines, LONG, strict=True))


@pytest.mark.parametrize("text", ["dog", "half of a pair: \ud83d"])
def test_numbers_that_are_not_finite_are_null(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [math.nan, math.inf, -math.inf, 1.5, 2, True, None]
    print_json({"text": text, "deep": [{"pair": (math.nan, 0.5)}], "numbers": numbers})
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert "Infinity" not in out
    assert json.loads(out) == {
        "text": text,
        "deep": [{"pair": [None, 0.5]}],
        "numbers": [None, None, None, 1.5, 2, True, None],
    }


def _refuse(constant: str) -> None:
    raise AssertionError(f"not JSON: {constant}")


def test_unknown_numbers_of_a_report_are_null_in_json_and_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = retrieval(np.eye(2), [0, 1], ks=(1,), bootstrap=0)
    unknown = known.model_copy(
        update={"rsum": math.nan, "i2t": known.i2t.model_copy(update={"mean_rank": math.inf})}
    )
    run = RunResult(run="a", model="vse", retrieval=unknown)
    out = tmp_path / "report.json"
    show(Evaluation(unknown, None, []), out, False, True)
    printed = [json.loads(capsys.readouterr().out, parse_constant=_refuse)]
    printed.append(json.loads(out.read_text(), parse_constant=_refuse))
    show_comparison(Comparison(split="test", runs=(run,)), out, False, True)
    for text in (capsys.readouterr().out, out.read_text()):
        printed.append(json.loads(text, parse_constant=_refuse)["runs"][0]["retrieval"])
    assert [tree["rsum"] for tree in printed] == [None] * 4
    assert [tree["i2t"]["mean_rank"] for tree in printed] == [None] * 4
    assert [tree["t2i"]["mean_rank"] for tree in printed] == [1.0] * 4
    foils = FoilReport(
        split="test",
        foils="rules",
        captions=1,
        left_out=0,
        pairs=1,
        accuracy=100.0,
        caption_accuracy=100.0,
        harder=0.0,
        gap=0.5,
        wod_auc=math.nan,
    )
    show_foils([foils], False, True)
    (tree,) = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    assert tree["wod_auc"] is None
    assert tree["gap"] == 0.5


def test_commands_print_json_by_one_function_only() -> None:
    folder = Path(counterfoil.cli.__file__).parent
    writers = {
        path.name
        for path in folder.glob("*.py")
        if re.search(r"json\.dumps|json\.loads\([^)]*to_json|model_dump_json", path.read_text())
    }
    assert writers == {"output.py"}
