"""`counterfoil demo` ends at the page, or says how to open it."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterfoil.app.load import can_correct
from counterfoil.cli.demo import _end_at_the_page
from counterfoil.errors import ConfigError
from counterfoil.training.load import load_model
from tests.cli.test_cli import invoke


def test_without_a_terminal_it_says_how_to_serve(capsys, tmp_path) -> None:
    for corrector, more in ((Path("b"), " --corrector b"), (None, "")):
        _end_at_the_page(Path("a"), corrector, True, 8000, tmp_path)
        assert f"counterfoil serve a{more}\n" in capsys.readouterr().out


def test_a_run_that_is_there_is_not_written_over(run, cache) -> None:
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke("demo", "--out", run, "--cache", cache)


@pytest.mark.slow
def test_a_small_demo_leaves_a_matcher_and_a_corrector(cache, tmp_path) -> None:
    asked = ["demo", "--images", 100, "--epochs", 1, "--out", tmp_path / "d", "--cache", cache]
    asked += ["--corrector"]
    said = " ".join(invoke(*asked).split())
    assert said.endswith(f"counterfoil serve {tmp_path}/d --corrector {tmp_path}/d-corrector")
    assert can_correct(load_model(tmp_path / "d-corrector"))
    assert load_model(tmp_path / "d").spec.name == "naaf"
