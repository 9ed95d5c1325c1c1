"""`counterfoil demo`: tests a pretrained model, finds planted errors, trains a small model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from counterfoil.app.connections import Limits
from counterfoil.app.content import Audit, AwaitedAudit, open_content
from counterfoil.app.images import Library
from counterfoil.audit.suspicion import WEIGHTS
from counterfoil.cli.demo import _content, _new_demo, _run, _show_message, _training_line
from counterfoil.cli.demo_background import AUDIT, Background, Failure
from counterfoil.cli.demo_stages import AuditResult, Demo, _make_room
from counterfoil.cli.signals import StopSignals
from counterfoil.core.config import load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.training.run_folder import holds_a_run, load_model
from tests.cli.test_cli import invoke

ROOT = Path(__file__).parents[2]
SMALL = ["demo", "--scenes", 30, "--train-scenes", 50, "--epochs", 1]
PATIENCE = 300.0
"""Seconds after which a process that gives no sign has failed."""


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


def same_demo(folder: Path, cache: Path) -> Demo:
    return _new_demo(folder, 30, 50, 1, cache, Silent())


@pytest.mark.parametrize(
    ("scenes", "train_scenes", "epochs", "quick"),
    [(500, 600, 3, True), (500, 600, 4, False), (500, 700, 3, False), (9000, 600, 1, False)],
)
def test_a_time_is_stated_only_for_the_numbers_it_was_measured_with(
    scenes, train_scenes, epochs, quick, tmp_path
) -> None:
    demo = _new_demo(tmp_path / "d", scenes, train_scenes, epochs, tmp_path, Silent())
    assert ("2 minutes" in _training_line(demo)) is quick
    assert ("1 epochs" in _training_line(demo)) is False


def test_without_a_terminal_both_tables_are_printed_beside_chance(small) -> None:
    folder, printed = small
    assert printed.count("chance, i → t") == 2
    assert printed.count("test, full: 30 images, 150 captions; RSUM") == 2
    assert printed.index("scenes-naaf, a pretrained model") < printed.index("trained from nothing")
    report = json.loads((folder / "results.json").read_text())
    assert f"RSUM {report['rsum']:.1f}" in printed


def test_the_time_to_the_first_results_counts_from_the_call_of_the_command(
    small, cache, capsys
) -> None:
    line = re.compile(r"^First results ready after (\d+) s\.$", re.MULTILINE)
    folder, printed = small
    assert len(line.findall(printed)) == 1
    assert line.search(printed).start() < printed.index("Planted errors")
    _run(same_demo(folder, cache), None, False, started=time.monotonic() - 4000)
    (seconds,) = line.findall(capsys.readouterr().out)
    assert 4000 <= int(seconds) < 4000 + PATIENCE


def test_the_pretrained_model_retrieves_scenes_that_it_was_not_trained_on(small) -> None:
    stored = json.loads((small[0].with_name("d-index") / "demo.json").read_text())
    retrieval = stored["retrieval"]
    assert retrieval["rsum"] > 3 * retrieval["rsum_chance"]
    assert stored["settings"]["scenes"] == {"images": [0, 0, 30]}


@pytest.mark.parametrize("change", [{"weights": {**WEIGHTS, "neighbors": 7}}, {"threshold": 0.5}])
def test_an_audit_by_other_weights_or_another_threshold_is_not_reused(
    copied, cache, change
) -> None:
    path = copied.with_name("d-audit") / "demo.json"
    stored = json.loads(path.read_text())
    assert same_demo(copied, cache).audited() is not None
    path.write_text(json.dumps({**stored, "settings": {**stored["settings"], **change}}))
    assert same_demo(copied, cache).audited() is None


def test_without_a_terminal_it_says_how_to_serve(small) -> None:
    folder, printed = small
    line = next(line for line in printed.splitlines() if line.startswith("Open the web page: "))
    assert line.endswith(
        f"counterfoil serve scenes-naaf --index {folder}-index --corrector scenes-corrector "
        f"--audit {folder}-audit --runs {folder.parent}"
    )


def test_a_run_that_is_there_is_not_written_over(run, cache) -> None:
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke(*SMALL, "--out", run, "--cache", cache)


def test_the_demo_prints_which_planted_captions_the_audit_found(small) -> None:
    folder, printed = small
    result = json.loads((folder.parent / "d-audit" / "demo.json").read_text())
    planted = result["planted"]
    assert {one["error"] for one in planted} == {"swapped", "words"}
    assert all(one["text"] != one["original"] for one in planted)
    rows = [line for line in printed.splitlines() if re.match(r"│ [✓–] ", line)]
    assert len(rows) == len(planted) == len(result["suggested"])
    assert sum("✓" in row.split("│")[1] for row in rows) == sum(one["listed"] for one in planted)
    assert f"{len(planted)} of 150 captions were made wrong on purpose" in printed
    assert re.search(r"precision \d+ % \(chance 16\.0 %\), recall \d+ %", printed)


def test_suggested_corrections_are_counted_and_compared_with_the_original(small) -> None:
    stored = (small[0].with_name("d-audit") / "demo.json").read_text()
    result = AuditResult.from_json(stored)
    planted = tuple(
        one.model_copy(update={"listed": True, "error": "words"}) for one in result.planted[:3]
    )
    suggested = (planted[0].original.upper(), "a wrong one", None)
    changed = result.model_copy(update={"planted": planted, "suggested": suggested})
    assert changed.correction_sentence() == (
        "Of the 3 listed captions with exchanged words, 2 got a suggested correction; 1 of these "
        "restore the original caption."
    )


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
    assert html.count("<dt>planted</dt>") >= len(marked) > 0


def test_the_page_searches_the_test_scenes_and_lists_the_run(small, cache) -> None:
    demo = same_demo(small[0], cache)
    awaited = AwaitedAudit(demo.audit_folder)
    content = _content(demo, awaited)
    try:
        assert len(content.index) == 30
        assert [one["name"] for one in content.runs.listed()] == ["d"]
        assert content.awaited_audit is awaited
        assert awaited.try_open() is not None
    finally:
        content.close()


def test_a_second_demo_shows_the_finished_one_and_computes_nothing(copied, cache) -> None:
    files = [copied / "metrics.jsonl"]
    files += [copied.with_name(f"d-{name}") / "demo.json" for name in ("audit", "index")]
    before = [file.stat().st_mtime_ns for file in files]
    again = json.loads(invoke(*SMALL, "--out", copied, "--cache", cache, "--json"))
    assert [file.stat().st_mtime_ns for file in files] == before
    assert again["trained"]["rsum"] == json.loads((copied / "results.json").read_text())["rsum"]
    assert again["results"]["images"] == 30
    assert len(again["audit"]["planted"]) == 24


def test_another_demo_in_the_folder_is_refused_without_overwrite(copied, cache) -> None:
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke(*SMALL[:3], "--train-scenes", 60, "--out", copied, "--cache", cache)


@pytest.mark.slow
def test_beside_the_page_a_failed_stage_is_reported_and_the_next_one_runs(copied, cache) -> None:
    messages: list[object] = []
    complete = threading.Event()

    def receive(message: object) -> None:
        messages.append(message)
        if len(messages) == 2:
            complete.set()

    demo = replace(same_demo(copied, cache), corrector=str(copied / "missing"))
    background = Background(demo, receive)
    background.start()
    try:
        assert complete.wait(PATIENCE)
    finally:
        unfinished = background.end()
    failure, trained = messages
    assert isinstance(failure, Failure)
    assert failure.stage == AUDIT
    assert "missing" in failure.reason
    assert isinstance(trained, RetrievalReport)
    assert not unfinished


def test_a_failure_beside_the_page_is_one_line_and_the_audit_tab_has_it(capsys, copied) -> None:
    demo, awaited = same_demo(copied, copied), AwaitedAudit(copied)
    _show_message(Failure(AUDIT, "the disk\nis full"), demo, awaited)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert printed.startswith("the audit failed: the disk")
    assert "is full" in awaited.problem


@pytest.mark.slow
def test_a_training_that_ends_with_the_page_continues_next_time(cache, tmp_path) -> None:
    options = (tmp_path / "d", 30, 50, 40, cache, Silent())
    demo = _new_demo(*options)
    demo.clear(overwrite=False)
    audited = threading.Event()
    background = Background(demo, lambda _: audited.set())
    background.start()
    try:
        assert audited.wait(PATIENCE)
        for _ in range(int(10 * PATIENCE)):
            if (demo.folder / "last").exists():
                break
            threading.Event().wait(0.1)
    finally:
        assert background.end()
    first = (demo.folder / "metrics.jsonl").read_bytes()
    assert first
    assert not (demo.folder / "results.json").exists()
    again = _new_demo(*options)
    assert again.train().images == 30
    assert (
        (demo.folder / "metrics.jsonl").read_bytes().startswith(first[: first.rfind(b"\n", 0, -1)])
    )


@pytest.mark.slow
def test_a_demo_without_its_audit_makes_it_again_without_training(copied, cache) -> None:
    shutil.rmtree(copied.parent / "d-audit")
    steps = (copied / "metrics.jsonl").read_text()
    invoke(*SMALL, "--out", copied, "--cache", cache)
    assert (copied / "metrics.jsonl").read_text() == steps
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
    command = [*SMALL, "--out", tmp_path / "d", "--cache", cache]
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "stop_requested", True)
        invoke(*command, code=130)
    assert not (tmp_path / "d" / "results.json").exists()
    first = (tmp_path / "d" / "metrics.jsonl").read_bytes()
    assert "trained from nothing, on the same test scenes" in invoke(*command)
    assert (tmp_path / "d" / "metrics.jsonl").read_bytes().startswith(first)


def test_make_shows_the_progress_of_pip_and_passes_arguments_on() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "install --quiet" not in text
    assert " -q " not in text
    if shutil.which("make") is None:
        pytest.skip("needs make")

    def commands(*args: str) -> str:
        command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo", *args]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "pip --disable-pip-version-check install" in commands()
    assert '".[app,vision]"' in commands()
    assert commands().rstrip().endswith("counterfoil demo")
    assert commands("ARGS=my-photos/").rstrip().endswith("counterfoil demo my-photos/")
