"""The recipes of the package: by name from any folder, listed, shown, copied, completed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.cli.train import _plan
from counterfoil.core.config import load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.recipes import FOLDER, find_recipe, matching_names, recipe_names
from counterfoil.core.unknown_names import check_names
from counterfoil.models import resolve
from counterfoil.objectives import create_objective

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; sys.argv = ['counterfoil']; from counterfoil.cli import main; main()"
FOLDERS = {"scenes", "flickr8k", "f30k", "coco"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Every test runs in an empty folder, where no recipe lies."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def run_folder(recipe: str, *overrides: str) -> str:
    """Where a run goes by default."""
    return _plan(recipe, list(overrides), None, resume=False, show=True)[1].as_posix()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_parts_that_exist(name) -> None:
    config = load_config(name)
    check_names(config)
    resolve(config.model)
    create_objective(config.objective)
    assert config == load_config(FOLDER / f"{name}.yaml")


def test_recipes_lie_in_a_folder_of_their_data() -> None:
    names = recipe_names()
    assert {name.partition("/")[0] for name in names if "/" in name} == FOLDERS
    assert [name for name in names if "/" not in name] == ["photos"]
    assert len(names) == sum(1 for _ in FOLDER.rglob("*.yaml")) > 100


@pytest.mark.parametrize("name", [name for name in recipe_names() if "/_" in name])
def test_shared_settings_are_extended_and_not_listed(name) -> None:
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.yaml")]
    assert sum(f"\nextends: {name}\n" in text for text in texts) > 1
    assert name not in matching_names("*")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("scenes/naff", "'scenes/naaf'"),
        ("naaf", "'coco/naaf', 'f30k/naaf', 'flickr8k/naaf' or 'scenes/naaf'"),
        ("naaf-scenes", "'scenes/naaf'"),
        ("scenes/naaf.yaml", "'scenes/naaf'"),
        ("recipes/photo.yaml", "'photos'"),
        ("mien.yaml", "'mine.yaml'"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(word, meant) -> None:
    Path("mine.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=f"no such recipe; did you mean {meant}"):
        load_config(word)


def test_a_name_leads_to_no_other_file_of_the_package() -> None:
    for word in ("../config", "scenes/../photos", str(FOLDER / "photos"), "scenes"):
        assert find_recipe(Path(word)) == Path(word)


def test_a_file_extends_a_file_beside_it_or_a_name() -> None:
    Path("sub").mkdir()
    Path("sub/base.yaml").write_text("extends: scenes/naaf\nseed: 3\n")
    Path("sub/mine.yaml").write_text("extends: base.yaml\ntrain: {epochs: 2}\n")
    expected = load_config("scenes/naaf", ["seed=3", "train.epochs=2"])
    assert load_config("sub/mine.yaml") == expected
    Path("sub/mine.yaml").write_text("extends: scenes/naff\n")
    with pytest.raises(ConfigError, match="did you mean 'scenes/naaf'"):
        load_config("sub/mine.yaml")


def test_a_table_of_ones_own_extends_one_of_the_package_by_name() -> None:
    from counterfoil.reproduce.catalogue import load_artifact

    Path("mine.yaml").write_text("extends: selhn.table1\nsummary: mine\n")
    mine, theirs = load_artifact("mine.yaml"), load_artifact("selhn.table1")
    assert (mine.name, mine.summary) == ("mine", "mine")
    assert mine.rows == theirs.rows


def test_runs_of_one_method_on_other_data_have_folders_of_their_own() -> None:
    assert run_folder("scenes/naaf") == "runs/scenes-naaf"
    assert run_folder("coco/naaf") == "runs/coco-naaf"
    assert run_folder(str(FOLDER / "coco" / "naaf.yaml")) == "runs/coco-naaf"
    assert run_folder("scenes/naaf", "train.epochs=3") == "runs/scenes-naaf-train.epochs=3"
    Path("mine.yaml").write_text("seed: 1\n")
    assert run_folder("mine.yaml") == "runs/mine"


def test_a_folder_of_the_same_name_hides_no_recipe() -> None:
    """Photos lie in ``photos``, and data sets in ``scenes/naaf``, say."""
    for name in ("photos", "scenes/naaf"):
        Path(name).mkdir(parents=True)
        shown = invoke("train", name, "--show-config")
        assert shown.strip() == load_config(name).to_yaml().strip()


def test_to_resume_a_run_its_recipe_can_be_named() -> None:
    Path("runs/mine").mkdir(parents=True)
    saved = load_config("scenes/vse-fc", ["train.device=cpu"])
    Path("runs/mine/config.yaml").write_text(saved.to_yaml())
    config, folder = _plan("scenes/vse-fc", ["runs/mine"], None, resume=True, show=True)
    assert (config.model, folder) == (saved.model, Path("runs/mine"))
    with pytest.raises(ConfigError, match=r"model\.name"):
        _plan("scenes/naaf", ["runs/mine"], None, resume=True, show=True)
    Path("photos").mkdir()  # which is a run here, although a recipe has its name
    Path("photos/config.yaml").write_text(saved.to_yaml())
    assert _plan("photos", [], None, resume=True, show=True)[1] == Path("photos")


def test_the_list_says_model_objective_and_data() -> None:
    lines = [line.split("  ") for line in invoke("recipes").splitlines()]
    assert [line[0] for line in lines] == matching_names("*")
    row = next(line for line in lines if line[0] == "scenes/rvsepp")
    assert [cell.strip() for cell in row if cell] == [
        "scenes/rvsepp", "rvse++-bigru", "selhn", "scenes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("scenes/rvse*", ["scenes/rvse-mlp", "scenes/rvsepp"]),
        ("naaf", ["coco/naaf", "f30k/naaf", "flickr8k/naaf", "scenes/naaf"]),
        ("*/tags-dc-l*", ["coco/tags-dc-large", "f30k/tags-dc-large"]),
        ("photos", ["photos"]),
    ],
)
def test_a_pattern_chooses_what_is_listed(pattern, names) -> None:
    listed = json.loads(invoke("recipes", pattern, "--json"))
    assert [one["name"] for one in listed] == names
    assert invoke("recipes", "list", pattern, "--json") == invoke("recipes", pattern, "--json")
    for one in listed:
        config = load_config(one["name"])
        assert (one["model"], one["data"]) == (config.model.name, config.data.source)
        assert one["objective"].split(" + ") == list(config.objective)
        assert one["summary"]


def test_a_folder_is_a_pattern_and_a_pattern_that_fits_nothing_an_error() -> None:
    listed = json.loads(invoke("recipes", "coco", "--json"))
    assert [one["name"] for one in listed] == matching_names("coco/*")
    with pytest.raises(ConfigError, match=r"'scenes/zz\*': no recipe has such a name"):
        invoke("recipes", "scenes/zz*")


def test_a_recipe_is_shown_as_it_is_written() -> None:
    written = (FOLDER / "scenes" / "naaf.yaml").read_text(encoding="utf-8")
    assert invoke("recipes", "show", "scenes/naaf") == written


def test_a_copy_trains_as_its_recipe_and_replaces_nothing_unasked(elsewhere) -> None:
    invoke("recipes", "copy", "scenes/naaf")
    assert load_config("naaf.yaml") == load_config("scenes/naaf")
    Path("naaf.yaml").write_text("seed: 7\n")
    for target in ([], ["."], ["naaf.yaml"]):
        with pytest.raises(ConfigError, match=r"naaf\.yaml: already exists.*--overwrite"):
            invoke("recipes", "copy", "coco/naaf", *target)
    assert load_config("naaf.yaml").seed == 7
    invoke("recipes", "copy", "coco/naaf", "--overwrite")
    invoke("recipes", "copy", "coco/naaf", "mine.yaml")
    assert load_config("naaf.yaml") == load_config("mine.yaml") == load_config("coco/naaf")
    invoke("recipes", "copy", "coco/naaf", "new/folder/")
    invoke("recipes", "copy", "coco/naaf", "other/mine.yaml")
    for inside in ("mine.yaml/x.yaml", "mine.yaml/new/"):
        with pytest.raises(ConfigError, match=r"x?\.yaml: its folder cannot be made: a file has"):
            invoke("recipes", "copy", "coco/naaf", inside)
    assert load_config("new/folder/naaf.yaml") == load_config("other/mine.yaml")
    assert sorted(path.name for path in elsewhere.iterdir()) == [
        *("mine.yaml", "naaf.yaml", "new", "other")
    ]


def completed(words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env=os.environ
        | {
            "_COUNTERFOIL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def test_a_shell_completes_names_and_files() -> None:
    Path("scenes").mkdir()
    Path("scenes/rv.yaml").write_text("seed: 1\n")
    results = ["scenes/rvse-mlp", "scenes/rvsepp", "scenes/rv.yaml"]
    assert completed("counterfoil train scenes/rv") == results


@pytest.mark.slow
def test_a_shell_completes_names_to_be_shown_and_commands() -> None:
    assert completed("counterfoil recipes show phot") == ["photos"]
    assert "copy" in completed("counterfoil recipes c")


def test_a_wheel_has_every_recipe() -> None:
    """Hatchling takes the whole package, except what git ignores."""
    tomllib = pytest.importorskip("tomllib")  # new in Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = settings["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["src/counterfoil"]}
    assert build.keys() == {"targets"}
    assert FOLDER.is_relative_to(ROOT / "src" / "counterfoil")
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    parts = {part for name in recipe_names() for part in f"{name}.yaml".split("/")}
    for pattern in ignored:
        assert not any(fnmatchcase(part, pattern.strip("/")) for part in parts), pattern
