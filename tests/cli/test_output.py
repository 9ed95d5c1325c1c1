"""Lists on a terminal and in a pipe; JSON."""

from __future__ import annotations

import json
import math
import re

import pytest

from counterfoil.cli.output import print_json, print_list

LONG = [["short", "one line"], ["much-longer-name", "a description of many words " * 8]]


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
