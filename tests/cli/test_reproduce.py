"""`counterfoil reproduce`: what it says of overrides before any run."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from counterfoil.cli import app

PLAN = ["reproduce", "selhn.table1", "--scale", "smoke", "--seeds", "1", "--dry-run", "--json"]


def test_rows_that_an_override_makes_equal_are_named_on_stderr(tmp_path) -> None:
    result = CliRunner().invoke(app, [*PLAN, "objective=triplet", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)) == 3
    said = " ".join(result.stderr.split())
    assert "warning: objective=triplet: these runs no longer differ" in said
    assert "vse-fc-triplet = vse-fc-hn = vse-fc-selhn; " in said


def test_an_override_that_keeps_the_rows_apart_gives_no_warning(tmp_path) -> None:
    result = CliRunner().invoke(app, [*PLAN, "train.epochs=1", "--out", str(tmp_path)])
    assert len(json.loads(result.stdout)) == 9
    assert result.stderr == ""
