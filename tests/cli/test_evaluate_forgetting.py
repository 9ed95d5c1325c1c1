"""`counterfoil evaluate RUN --forgetting`, and the section of a fine-tuning run's report."""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import closing

import pytest

from counterfoil.core.config import build_config, load_config
from counterfoil.core.errors import ConfigError
from counterfoil.data.pairs import Split
from counterfoil.evaluation.forgetting import ForgettingReport
from counterfoil.models.store import save_pretrained
from counterfoil.training.run import execute, forgetting_section
from counterfoil.training.run_folder import load_model
from tests.cli.test_cli import invoke
from tests.core.hub_server import hub_server
from tests.core.test_hub import COMMANDS, Programs, files_of
from tests.training.test_run_warm_start import Heard


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A cache, a run, and one that starts from it."""
    root = tmp_path_factory.mktemp("forgetting")
    heard = Heard()
    for name, objective, start in (
        ("start", {"infonce": {}}, None),
        ("tuned", {"negclip": {"source": "rules"}}, str(root / "start")),
    ):
        config = build_config(
            {
                "data": {"options": {"images": [24, 8, 12]}, "min_count": 1},
                "model": {
                    "name": "vse-fc",
                    "embed_size": 16,
                    "text": {"word_dim": 8},
                    "init_from": start,
                },
                "objective": objective,
                "train": {"epochs": 1, "batch_size": 16, "log_every": 1},
                "evaluation": {"bootstrap": 30},
            }
        )
        execute(config, root / name, root / "cache", progress=heard)
    return root, heard.lines


def test_a_fine_tuning_run_reports_what_it_gained_and_lost(folders) -> None:
    root, lines = folders
    report = ForgettingReport.from_json((root / "tuned" / "forgetting.json").read_text())
    assert (report.start, report.run, report.images) == ("start", "tuned", 12)
    assert {change.kind for change in report.changes} == {"foils", "retrieval", "classes"}
    assert all(change.interval is not None for change in report.changes)
    assert f"against start: {report.sentence()}" in lines
    page = (root / "tuned" / "report.html").read_text()
    assert "Gained and lost against the start" in page
    assert "classes by prompts (things)" in page
    assert (root / "tuned" / "forgetting.png").is_file()
    assert not (root / "start" / "forgetting.json").exists()
    assert "Gained and lost" not in (root / "start" / "report.html").read_text()


@pytest.mark.slow
def test_the_command_gives_the_report_of_the_run(folders, tmp_path) -> None:
    root, _ = folders
    args = ["evaluate", root / "tuned", "--forgetting", "--cache", root / "cache"]
    tree = json.loads(invoke(*args, "--bootstrap", 30, "--json"))
    assert tree == json.loads((root / "tuned" / "forgetting.json").read_text())
    invoke(*args, "--bootstrap", 10, "--out", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    text = invoke(*args, "--bootstrap", 0, "--markdown", "--out", tmp_path / "report.md")
    assert "| text → image |" in text
    assert (tmp_path / "report.md").read_text() == text.rstrip("\n") + "\n"
    shown = " ".join(invoke(*args, "--bootstrap", 0).split())
    assert "true > foil" in shown


def test_classes_and_another_start_can_be_given(folders, tmp_path) -> None:
    root, _ = folders
    (tmp_path / "kinds.txt").write_text("dog\nman\nwoman\ntree\nhouse\nball\ncar\nbox\n")
    args = ["evaluate", root / "start", "--forgetting", "--start", root / "tuned", "--json"]
    tree = json.loads(invoke(*args, "--classes", tmp_path / "kinds.txt", "--cache", root / "cache"))
    names = [change["name"] for change in tree["changes"]]
    assert "classes by prompts (kinds)" in names
    assert (tree["start"], tree["run"]) == ("tuned", "start")


def test_what_cannot_be_compared_is_refused(folders) -> None:
    root, _ = folders
    with pytest.raises(ConfigError, match="did not start from another model"):
        invoke("evaluate", root / "start", "--forgetting", "--cache", root / "cache")
    with pytest.raises(ConfigError, match="compares one run with its start, got 2"):
        invoke(
            "evaluate", root / "start", root / "tuned", "--forgetting", "--cache", root / "cache"
        )
    with pytest.raises(ConfigError, match="--start belongs to --forgetting"):
        invoke("evaluate", root / "tuned", "--start", root / "start")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--forgetting --words", "with --forgetting, leave out --words"),
        ("--forgetting --folds 5 --separately", "leave out --folds, --separately"),
        ("--forgetting --identical-captions positives", "leave out --identical-captions"),
        ("--max-captions 5", "--max-captions belongs to --words"),
        ("--shortlist-size 9", "--shortlist-size belongs to --retriever"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(folders, options, message) -> None:
    root, _ = folders
    with pytest.raises(ConfigError, match=message):
        invoke("evaluate", root / "tuned", *options.split())


def test_a_start_that_is_gone_does_not_fail_the_run(folders, tmp_path) -> None:
    root, _ = folders
    config = load_config(root / "tuned" / "config.yaml")
    model = config.model.model_copy(update={"init_from": str(tmp_path / "gone")})
    heard = Heard()
    best = load_model(root / "tuned", "cpu")
    split = Split("test", [], [])
    gone = config.model_copy(update={"model": model})
    (section,) = forgetting_section(gone, tmp_path, best, split, heard)
    assert "Not compared with gone" in section.sentences[0]
    assert heard.lines[0].startswith("not compared with gone: ")
    with pytest.raises(ConfigError, match="which is gone; name a copy with --start"):
        _start_of_moved(root, tmp_path)


@pytest.mark.slow
def test_a_start_on_the_hub_is_downloaded_into_the_cache_that_is_given(folders, tmp_path) -> None:
    root, _ = folders
    shutil.copytree(root / "tuned", tmp_path / "tuned")
    path = tmp_path / "tuned" / "config.yaml"
    path.write_text(path.read_text().replace(str(root / "start"), "hf://me/start"))
    save_pretrained(load_model(root / "start", "cpu"), tmp_path / "saved")
    options = ["--forgetting", "--bootstrap", "0", "--json", "--cache", str(tmp_path / "given")]
    command = shlex.join(["evaluate", str(tmp_path / "tuned"), *options])
    with hub_server() as hub, closing(Programs(tmp_path)) as programs:
        hub.commit("me/start", files_of(tmp_path / "saved"))
        tree = json.loads(programs.run(hub, tmp_path, COMMANDS, command))
    assert (tree["start"], tree["run"]) == ("start", "tuned")
    assert list((tmp_path / "given" / "pretrained" / "hub" / "me--start").rglob("config.json"))
    report = json.loads((root / "tuned" / "forgetting.json").read_text())
    values = [[(one["before"], one["after"]) for one in of["changes"]] for of in (tree, report)]
    assert values[0] == values[1]


def _start_of_moved(root, tmp_path) -> None:
    """A run whose start was deleted."""
    shutil.copytree(root / "tuned", tmp_path / "moved")
    text = (tmp_path / "moved" / "config.yaml").read_text()
    path = tmp_path / "moved" / "config.yaml"
    path.write_text(text.replace(str(root / "start"), str(tmp_path / "deleted")))
    invoke("evaluate", tmp_path / "moved", "--forgetting", "--cache", root / "cache")
