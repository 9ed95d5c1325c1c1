"""`counterfoil demo`: trains, finds the errors that it planted, ends at the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from counterfoil.app.connections import Limits
from counterfoil.app.content import Audit, open_content
from counterfoil.app.images import Library
from counterfoil.cli.demo import _end_at_the_page
from counterfoil.cli.demo_stages import Corrections, DemoResult, _make_room
from counterfoil.cli.signals import StopSignals
from counterfoil.core.config import load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.models.correct import can_correct
from counterfoil.training.run_folder import holds_a_run, load_model
from tests.cli.test_cli import invoke

ROOT = Path(__file__).parents[2]
SMALL = ["demo", "--images", 100, "--epochs", 1]


@pytest.fixture(scope="module")
def small(cache, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a tiny demo, and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "d"
    return folder, invoke(*SMALL, "--out", folder, "--cache", cache)


@pytest.fixture
def copied(small, tmp_path) -> Path:
    """A copy of the tiny demo, to be damaged."""
    shutil.copytree(small[0].parent, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy" / "d"


def test_without_a_terminal_it_says_how_to_serve(capsys, tmp_path) -> None:
    for corrector, more in ((Path("b"), " --corrector b"), (None, "")):
        _end_at_the_page(Path("a"), corrector, Path("a-audit"), True, 8000, tmp_path)
        assert f"counterfoil serve a{more} --audit a-audit\n" in capsys.readouterr().out


def test_a_run_that_is_there_is_not_written_over(run, cache) -> None:
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke("demo", "--out", run, "--cache", cache)


def test_the_demo_prints_which_planted_captions_the_audit_found(small) -> None:
    folder, printed = small
    result = json.loads((folder.parent / "d-audit" / "demo.json").read_text())
    planted = result["planted"]
    assert {one["error"] for one in planted} == {"swapped", "words"}
    assert all(one["text"] != one["original"] for one in planted)
    rows = [line for line in printed.splitlines() if re.match(r"│ [✓–] ", line)]
    assert len(rows) == len(planted)
    assert sum("✓" in row.split("│")[1] for row in rows) == sum(one["listed"] for one in planted)
    assert f"{len(planted)} of 50 captions were made wrong on purpose" in printed
    assert re.search(r"precision \d+ % \(chance 20\.0 %\), recall \d+ %", printed)


def test_the_audit_tab_of_the_demo_shows_findings_with_pictures(small, cache) -> None:
    folder, _ = small
    audit = folder.parent / "d-audit"
    content = open_content(folder, audit=audit, cache=cache, progress=Silent())
    try:
        page = content.audit.page(0, 100, None)
        assert page["total"] > 0
        assert "made wrong on purpose" in page["notes"][0]
        library = Library(content.index, Limits(), content.audit.images)
        for one in page["findings"]:
            assert library.picture(one["image_names"][one["image"]]).width > 0
    finally:
        content.close()
    planted = json.loads((audit / "demo.json").read_text())["planted"]
    listed = {(one["image"], one["caption"]): one["original"] for one in planted if one["listed"]}
    marked = {
        (one["image"], one["caption"]): one["planted"]["original"]
        for one in page["findings"]
        if one["planted"]
    }
    assert listed.items() <= marked.items()
    html = (audit / "index.html").read_text()
    assert "data:image/jpeg;base64," in html
    assert html.count("<dt>planted</dt>") == len(marked)


def test_the_report_of_the_demo_has_chance_the_audit_and_a_place_for_corrections(small) -> None:
    page = (small[0] / "report.html").read_text()
    for text in ("chance, i → t", "<h2>Audit</h2>", "made wrong on purpose", "recall %"):
        assert text in page
    planted = json.loads((small[0].parent / "d-audit" / "demo.json").read_text())["planted"]
    assert "<h2>Planted captions</h2>" in page
    assert page.count("scene-test-") >= len(planted)
    assert "<h2>Corrections</h2><p>No corrector was trained" in page


def test_a_second_demo_shows_the_finished_one_and_trains_nothing(copied, cache) -> None:
    before = (copied / "metrics.jsonl").stat().st_mtime_ns
    again = invoke(*SMALL, "--out", copied, "--cache", cache)
    assert "made wrong on purpose" in again
    assert (copied / "metrics.jsonl").stat().st_mtime_ns == before


def test_another_demo_in_the_folder_is_refused_without_overwrite(copied, cache) -> None:
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke("demo", "--images", 110, "--epochs", 1, "--out", copied, "--cache", cache)


@pytest.mark.slow
def test_a_demo_without_its_audit_makes_it_again_without_training(copied, cache) -> None:
    shutil.rmtree(copied.parent / "d-audit")
    (copied / "report.html").unlink()
    steps = (copied / "metrics.jsonl").read_text()
    invoke(*SMALL, "--out", copied, "--cache", cache)
    assert (copied / "metrics.jsonl").read_text() == steps
    assert "<h2>Audit</h2>" in (copied / "report.html").read_text()
    assert Audit(copied.parent / "d-audit").page(0, 1, None)["total"] > 0


@pytest.mark.slow
def test_a_demo_with_a_damaged_checkpoint_begins_anew(copied, cache) -> None:
    weights = next((copied / "best").resolve().glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    invoke(*SMALL, "--out", copied, "--cache", cache)
    assert load_model(copied).spec.name == "naaf"


def test_a_demo_folder_that_lost_its_config_is_cleared(copied) -> None:
    config = load_config(copied / "config.yaml")
    (copied / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="--overwrite"):
        _make_room(copied, config, may_delete=False)
    _make_room(copied, config, may_delete=True)
    assert not holds_a_run(copied)


@pytest.mark.slow
def test_an_interrupted_demo_exits_with_130_and_goes_on_next_time(
    cache, tmp_path, monkeypatch
) -> None:
    asked = [*SMALL, "--out", tmp_path / "d", "--cache", cache]
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "asked", True)
        invoke(*asked, code=130)
    assert not (tmp_path / "d" / "results.json").exists()
    first = (tmp_path / "d" / "metrics.jsonl").read_bytes()
    assert "made wrong on purpose" in invoke(*asked)
    assert (tmp_path / "d" / "metrics.jsonl").read_bytes().startswith(first)


def test_the_precision_of_corrections_and_how_often_none_is_made_are_said(small) -> None:
    result = DemoResult.from_json((small[0].with_name("d-audit") / "demo.json").read_text())
    made = Corrections(exchanged=200, unchanged=150, changes=50, right=40, needless=3)
    configs = {**result.configs, "corrector": {}}
    trained = result.model_copy(update={"configs": configs})
    said = trained.model_copy(update={"corrections": made}).correction_sentence()
    assert "50 were corrected (left unchanged: 75 %)" in said
    assert "40 of 50 changes are right: precision 80 %" in said
    assert "3 had a word changed" in said
    assert "No corrector was trained" in result.correction_sentence()
    assert "not measured" in trained.correction_sentence()


def test_make_shows_the_progress_of_pip_and_corrects_only_if_asked() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "install --quiet" not in text
    assert " -q " not in text
    if shutil.which("make") is None:
        pytest.skip("needs make")

    def commands(*args: str) -> str:
        asked = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo", *args]
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "pip --disable-pip-version-check install" in commands()
    assert commands().rstrip().endswith("counterfoil demo")
    assert commands("ARGS=--corrector").rstrip().endswith("counterfoil demo --corrector")


@pytest.mark.slow
def test_a_small_demo_leaves_a_matcher_and_a_corrector(cache, tmp_path) -> None:
    asked = [*SMALL, "--out", tmp_path / "d", "--cache", cache, "--corrector"]
    said = " ".join(invoke(*asked).split())
    serve = f"counterfoil serve {tmp_path}/d --corrector {tmp_path}/d-corrector"
    assert said.endswith(f"{serve} --audit {tmp_path}/d-audit")
    assert can_correct(load_model(tmp_path / "d-corrector"))
    assert load_model(tmp_path / "d").spec.name == "naaf"
    report = (tmp_path / "d" / "report.html").read_text()
    assert "test captions with words exchanged by rule" in report
