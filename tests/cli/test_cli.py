"""The command line as a person uses it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from counterfoil.cli import GROUPS, TAGLINE, app, home_expanded
from counterfoil.core import registry
from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.matchers import matchers
from tests.conftest import all_charts, thinned

runner = CliRunner()
SMALL = [
    "data.source=scenes",
    "data.options.images=100",
    "model.name=vse-fc",
    "data.min_count=1",
    "model.embed_size=32",
    "model.text.word_dim=16",
    "objective=triplet",
    "train.optimizer.lr=0.01",
    "train.batch_size=32",
    "train.epochs=3",
    "seed=3",  # well above chance (RSUM 342, chance 281), whatever the last digits
    "evaluation.bootstrap=50",
]


@pytest.fixture(scope="session")
def run(cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    with all_charts():
        invoke("train", *SMALL, "--out", folder, "--cache", cache)
    return folder


def invoke(*args: object, code: int = 0) -> str:
    result = runner.invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def test_training_leaves_a_report_with_everything_in_one_file(run) -> None:
    page = (run / "report.html").read_text()
    assert page.count("data:image/jpeg;base64,") >= 3 * 5 + 3
    assert "data:image/svg+xml;base64," in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    for name in ("loss.png", "rsum.png", "learning-rate.png", "results.json", "config.yaml"):
        assert (run / name).stat().st_size > 100


def test_evaluating_a_run_repeats_its_result(run, cache) -> None:
    stored = json.loads((run / "results.json").read_text())
    printed = json.loads(invoke("evaluate", run, "--json", "--bootstrap", 50, "--cache", cache))
    assert printed["rsum"] == stored["rsum"]
    assert printed["rsum_chance"] < printed["rsum"]
    assert printed["tie_rule"]


def test_an_ensemble_of_one_model_with_itself_is_that_model(run, cache) -> None:
    one, two = (
        json.loads(invoke("evaluate", *runs, "--json", "--bootstrap", 0, "--cache", cache))
        for runs in ([run], [run, run])
    )
    assert one["rsum"] == pytest.approx(two["rsum"])
    alike = ["evaluate", run, run, "--standardize", "--json", "--bootstrap", 0, "--cache", cache]
    assert json.loads(invoke(*alike))["rsum"] == pytest.approx(one["rsum"])


def test_evaluation_prints_markdown_and_writes_json(run, cache, tmp_path) -> None:
    text = invoke("evaluate", run, "--markdown", "--out", tmp_path / "r.json", "--cache", cache)
    assert "| " in text
    assert "R@1" in text
    assert json.loads((tmp_path / "r.json").read_text())["split"] == "test"


@pytest.mark.parametrize("command", ["evaluate", "evaluate-words"])
def test_a_report_that_cannot_be_written_is_refused_before_the_data_are_read(
    command, run, tmp_path
) -> None:
    (tmp_path / "file").write_text("mine")
    scenes = ("--data", "scenes", "--option", "images=100", "--cache", tmp_path / "cache")
    for out, reason in ((tmp_path, "is a folder"), (tmp_path / "file" / "r.md", "not a folder")):
        with pytest.raises(ConfigError, match=f"--out {out}: .*{reason}"):
            invoke(command, run, *scenes, "--out", out)
    assert not (tmp_path / "cache").exists()


def test_scoring_an_image_with_sentences(run, cache, tmp_path) -> None:
    from counterfoil.data.images import open_image
    from counterfoil.data.load import load_pairs

    pairs = load_pairs("scenes", options={"images": 100}, cache_dir=cache)
    open_image(pairs.test.pixels[0]).save(tmp_path / "a.png")
    (tmp_path / "lines.txt").write_text("\ufeffa dog\n\nzwei red Hunde\n", encoding="utf-8")
    printed = json.loads(
        invoke(
            "score",
            run,
            tmp_path / "a.png",
            "-t",
            "a red car",
            "--texts",
            tmp_path / "lines.txt",
            "--json",
        )
    )
    assert printed["texts"] == ["a red car", "a dog", "zwei red Hunde"]
    assert printed["unknown"] == [[], [], ["zwei", "Hunde"]]
    assert np.isfinite(printed["scores"]).all()
    piped = runner.invoke(
        app, ["score", str(run), str(tmp_path / "a.png"), "--texts", "-", "--json"], input="a dog\n"
    )
    assert json.loads(piped.stdout)["scores"] == [[printed["scores"][0][1]]]
    for name in ("a.png", *(f"{number}/a.png" for number in range(7))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((tmp_path / "a.png").read_bytes())
    one = f"{printed['scores'][0][1]:.4f}"
    few = invoke("score", run, tmp_path / "a.png", tmp_path / "0" / "a.png", "-t", "a dog")
    assert few.count(one) == 2
    many = [tmp_path / str(number) / "a.png" for number in range(7)]
    listed = invoke("score", run, *many, "-t", "a dog", "-t", "a red car")
    assert listed.count(one) == 7
    assert "…" not in listed.replace("a dog", "")
    with pytest.raises(DataError, match="knows no word"):
        invoke("score", run, tmp_path / "a.png", "-t", "zwei Hunde")
    with pytest.raises(DataError, match="sentence 2 of --text: 'Hunde': the model knows no word"):
        invoke("score", run, tmp_path / "a.png", "-t", "a dog", "-t", "Hunde")
    with pytest.raises(DataError, match=r"sentence 2 of --text: .*has no words"):
        invoke("score", run, tmp_path / "a.png", "-t", "a dog", "-t", "")
    (tmp_path / "lines.txt").write_text("a dog\n\nHunde\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"lines\.txt:3: 'Hunde': the model knows no word"):
        invoke("score", run, tmp_path / "a.png", "--texts", tmp_path / "lines.txt")
    with pytest.raises(ConfigError, match="nothing to score"):
        invoke("score", run, tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"b\.png"):
        invoke("score", run, tmp_path / "b.png", "-t", "a dog")


def test_an_existing_run_is_not_overwritten_by_accident(run, cache) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        invoke("train", *SMALL, "--out", run, "--cache", cache)


def test_resuming_a_finished_run_gives_its_result_again(run, cache) -> None:
    before = (run / "results.json").read_bytes()
    invoke("train", "--resume", run, "--cache", cache)
    assert (run / "results.json").read_bytes() == before


def test_resuming_with_another_model_is_refused_and_named(run, cache) -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_size|model"):
        invoke("train", "--resume", run, "model.embed_size=64", "--cache", cache)


def test_resuming_nothing_is_a_clear_error(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no unfinished run"):
        invoke("train", "--resume", "--cache", cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a run"):
        invoke("train", "--resume", tmp_path / "empty", "--cache", cache)


def test_the_resolved_config_is_shown_without_training() -> None:
    shown = invoke("train", "train.epochs=3", "objective=triplet", "--show-config")
    assert "epochs: 3" in shown
    assert "triplet" in shown


def test_the_catalogue_lists_models_and_parts() -> None:
    listed = json.loads(invoke("models", "--json"))
    assert "rvse-mlp" in listed["models"]
    assert {"triplet", "hardest"} <= set(listed["objectives"])
    only = json.loads(invoke("models", "vse*", "--json"))
    assert set(only["models"]) == {n for n in listed["models"] if n.startswith("vse")}
    assert "rvse-mlp" in invoke("models")


def test_inspecting_a_faulty_folder_names_the_faults_and_fails(tmp_path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    (tmp_path / "captions.csv").write_text(
        "image,caption,split\na.png,a dog,train\na.png,,train\nb.png,x,train\nc.png,y,train\n"
    )
    shown = invoke("data", "inspect", tmp_path / "captions.csv", "--json")
    kinds = json.loads(shown)["problem_counts"]
    assert kinds.keys() >= {"empty-caption"}
    assert sum(kinds.values()) >= 3
    np.save(tmp_path / "train_ims.npy", np.zeros((2, 3, 4), np.float32))
    (tmp_path / "train_caps.txt").write_text("a\nb\nc\n")
    invoke("data", "inspect", tmp_path, "--format", "scan", code=3)


def test_what_stops_the_work_is_listed_before_thousands_of_images_to_be_skipped(tmp_path) -> None:
    rows = [f"{number}.jpg,a dog,train" for number in range(60)]
    (tmp_path / "captions.csv").write_text("\n".join(["image,caption,split", *rows]))
    shown = invoke("data", "inspect", tmp_path / "captions.csv", code=3)
    assert "none of its 60 image files exists" in " ".join(shown.split())


@pytest.mark.slow
def test_converting_scenes_with_features_and_training_on_the_copy(cache, tmp_path) -> None:
    invoke(
        "data",
        "convert",
        "scenes",
        tmp_path / "copy",
        "--to",
        "scan",
        "--features",
        "segments",
        "--option",
        "images=100",
        "--cache",
        cache,
    )
    changed = [a.replace("data.source=scenes", f"data.source={tmp_path / 'copy'}") for a in SMALL]
    changed = [a for a in changed if "options" not in a]
    invoke("train", *changed, "train.epochs=1", "--out", tmp_path / "run", "--cache", cache)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["images"] == 10


def test_help_shows_every_command_once_in_a_panel_of_its_kind() -> None:
    page = invoke("--help")
    places = [page.index(f" {panel} ") for panel in GROUPS]
    assert places == sorted(places)
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(
        get_command(app).commands
    )
    for name in get_command(app).commands:
        assert page.count(f"│ {name} ") == 1, name
    assert TAGLINE in page
    assert "First steps" in page


def test_every_command_says_what_each_argument_is_and_gives_an_example() -> None:
    def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
        below = getattr(command, "commands", {})
        for name, one in below.items():
            yield from walk(one, (*words, name))
        if not below:
            yield " ".join(words), command

    for name, one in walk(get_command(app)):
        assert "[bold]Example" in one.help, name
        shown = re.sub(" (build|list|check)$", "", f"counterfoil {name}")  # need not be typed
        assert shown in one.help, name
        for parameter in one.params:
            assert parameter.help, (name, parameter.name)


def test_paragraphs_of_help_are_not_broken_where_the_source_is() -> None:
    texts = get_command(app).commands["train"].help.split("\n\n")
    assert all("\n" not in text for text in texts if not text.startswith(" "))
    assert any(text.count("\n") > 2 for text in texts if text.startswith(" "))


def test_tables_and_figures_are_listed_by_a_pattern() -> None:
    lines = invoke("reproduce", "naaf.*").splitlines()
    assert [line.split()[0] for line in lines[:6]] == [
        *("naaf.figure3", "naaf.figure4"),
        *(f"naaf.table{n}" for n in (1, 2, 3, 4)),
    ]
    listed = json.loads(invoke("reproduce", "naaf.table?", "--json"))
    assert {one["kind"] for one in listed} == {"table"}
    with pytest.raises(ConfigError, match="no table or figure"):
        invoke("reproduce", "naff.*")


def test_options_are_listed_of_what_is_named() -> None:
    (line,) = (one for one in invoke("models", "selhn").splitlines() if one.startswith("selhn"))
    assert "margin=0.2" in line
    assert "margin=0.2" not in invoke("models")
    for more in ([], ["--json"]):
        with pytest.raises(ConfigError, match="no such name"):
            invoke("models", "selhnn", *more)


NO_RUN = ("evaluate nowhere", 4, "nowhere")


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "counterfoil", *args], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("args", "code", "message"),
    thinned(
        [
            ("train train.epoch=3", 2, "did you mean 'train.epochs'"),
            ("train nowhere.yaml", 2, "no such recipe"),
            ("data inspect nowhere", 3, "no such file or folder"),
            NO_RUN,
            ("evaluate scenes-naaf --standardize", 2, "name two or more"),
            (
                "evaluate scenes-naaf scenes-naaf --words --standardize",
                2,
                "with --standardize, leave out --words",
            ),
        ],
        NO_RUN,
    ),
)
def test_errors_are_one_message_and_their_own_exit_code(args, code, message) -> None:
    done = command(*args.split())
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_characters_that_the_terminal_lacks_are_printed_as_escapes(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command("--help")
    assert done.returncode == 0, done.stderr
    assert TAGLINE.replace("–", r"\u2013") in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("--out=~/runs", "--out=/home/me/runs"),
        ("data.source=~/my photos", "data.source=/home/me/my photos"),
        ("--out=~", "--out=/home/me"),
        ("--option=images=~/photos", "--option=images=/home/me/photos"),
        ("--out=runs/~x", "--out=runs/~x"),
        ("--out=~x", "--out=~x"),
        ("a dog =~/", "a dog =~/"),
        ("~/runs", "~/runs"),  # the shell's own
    ],
)
def test_the_home_folder_after_an_equals_sign(word, expanded, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    assert home_expanded(word) == expanded


OWN_MATCHER = """
from counterfoil.matchers.base import matchers
from counterfoil.matchers.chan import CHAN

@matchers.register("my-chan")
class MyCHAN(CHAN):
    "CHAN by another name."
"""


def test_a_part_of_ones_own_is_imported_by_its_module(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_parts.py").write_text(OWN_MATCHER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matchers, "_entries", {**matchers._entries})  # as before, afterwards
    monkeypatch.setattr(registry, "own_modules", [])
    assert "CHAN by another name" in command("--import", "my_parts", "models", "my-chan").stdout
    plan = ["--import", "my_parts", "train", "scenes/naaf", "--show-config"]
    with pytest.raises(ConfigError, match=r"'my-chan' has no option 'lambda_sofmax'"):
        invoke(*plan, "model.matcher={name: my-chan, lambda_sofmax: 9}")
    with pytest.raises(ConfigError, match="unknown matcher 'my-chen'; did you mean 'my-chan'"):
        invoke(*plan, "model.matcher={name: my-chen}")
    (tmp_path / "my.py").write_text("import m_that_is_missing\n")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command inserts this folder
    for name, message in (
        ("no_parts", "--import no_parts: no such module"),
        ("sub/my_parts.py", "did you mean 'sub.my_parts'"),
        ("/some/where/my_parts.py", "with PYTHONPATH=/some/where it is --import my_parts"),
        ("../my_parts.py", "with PYTHONPATH=.. it is --import my_parts"),
        ("", "not the name of a module"),
        (".x", "not the name of a module"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            invoke("--import", name, "models", "my-chan")
    own = command("--import", "my", "models")
    assert "No module named 'm_that_is_missing'" in own.stderr
