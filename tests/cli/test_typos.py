"""Typos are found at once: before torch, models or data are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.models import models
from counterfoil.objectives import objectives

ROOT = Path(__file__).parents[2]
SCRIPT = """
import functools, json, sys
import typer.testing
from typer.testing import CliRunner
from counterfoil.cli import app
from counterfoil.core.registry import declared

typer.testing._get_command = functools.cache(typer.testing._get_command)
results = []
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words)
    error = result.exception
    code = getattr(error, "exit_code", result.exit_code)
    results.append([code, f"{result.output} {error}", "torch" in sys.modules])
read = {name: declared(name, name) for name in ("models", "objectives")}
print(json.dumps({"results": results, "declared": read}))
"""

TYPOS = [
    (["train", "train.epoch=3"], 2, "did you mean 'train.epochs'"),
    (["train", "modle=naaf"], 2, "did you mean 'model'"),
    (["train", "train.epochs=many"], 2, "train.epochs"),
    (["train", "train.epochs=-1"], 2, "train.epochs"),
    (["train", "model=naff"], 2, "did you mean 'naaf'"),
    (["train", "model.name=vse+++"], 2, "did you mean 'vse++'"),
    (["train", "objective=hardst"], 2, "did you mean 'hardest'"),
    (["train", "objective={hardest: 1, tripplet: 0.1}"], 2, "did you mean 'triplet'"),
    (["train", "objective.hardest.margn=0.1"], 2, "did you mean 'margin'"),
    (["train", "model.matcher.name=cosin"], 2, "did you mean 'cosine'"),
    (["train", "model.image.name=of-my-own"], 2, "counterfoil --import MODULE"),
    (["train", "model.matcher=scan"], 2, "write model.matcher.name=scan"),
    (["train", "data.images=9"], 2, "data.options.images"),
    (["train", "objective=mean-gap"], 2, "counterfoil --import MODULE"),
    (["train", "--resume", "nowhere", "--overwrite"], 2, "give one of them"),
    (["evaluate", "pyproject.toml"], 4, "or as --data"),
    (["train", "scenes/rvse-mpl"], 2, "did you mean 'scenes/rvse-mlp'"),
    (["train", "scenes/rvse-mlp.yaml"], 2, "did you mean 'scenes/rvse-mlp'"),
    (["train", "rvse-mlp-scenes"], 2, "did you mean 'scenes/rvse-mlp'"),
    (["train", "scenes/rvse-mlp", "epochs"], 2, "neither a recipe nor key=value"),
    (["train", "--resume", "nowhere"], 4, "no run there to resume"),
    (["train", "scenes/rvse-mlp", "--resume", "nowhere"], 4, "no run there to resume"),
    (["train", "data.source=nowhere.csv"], 3, "no such file or folder"),
    (["train", "data.source=docs", "data.format=tabel"], 2, "did you mean 'table'"),
    (["train", "data.options.imges=9"], 2, "did you mean 'images'"),
    (["train", "data.features.extractor=segmnts"], 2, "did you mean 'segments'"),
    (["train", "data.features.options.sies=9"], 2, "extractor 'segments' has no option 'sies'"),
    (["train", "model=naaf", "model.matcher.adjust_epch=3"], 2, "did you mean 'adjust_epoch'"),
    (["train", "model.text={name: bigru, word_dimm: 8}"], 2, "did you mean 'word_dim'"),
    (["train", "model.image.poolling=max"], 2, "did you mean 'pooling'"),
    (["train", "objective.ndgl.guide=nowhere"], 3, "not a guide"),
    (["train", "data.vocabulary=nowhere.json"], 3, "data.vocabulary: nowhere.json: no such file"),
    (["train", "data.noise_index=nowhere.npy"], 3, "data.noise_index: nowhere.npy: no such file"),
    (["recipes", "scenes/rvse-mpl"], 2, "did you mean 'scenes/rvse-mlp'"),
    (["recipes", "show", "scenes/naff"], 2, "did you mean 'scenes/naaf'"),
    (["recipes", "copy", "scenes/naff"], 2, "did you mean 'scenes/naaf'"),
    (["features", "scenes", "-o", "out", "-b", "segmnts"], 2, "did you mean 'segments'"),
    (["features", "scenes", "-o", "out", "--to", "shard"], 2, "did you mean 'shards'"),
    (["features", "scenes", "-o", "out", "-b", "segments", "--backbone-option", "sies=9"], 2,
     "has no option 'sies'"),
    (["evaluate", "nowhere"], 4, "neither a run nor a saved model"),
    (["explain", "nowhere", "photo.png", "a dog"], 4, "neither a run nor a saved model"),
    (["correct", "nowhere", "photo.png", "a dog"], 4, "neither a run nor a saved model"),
    (["score", "nowhere", "photo.png", "-t", "a dog"], 4, "neither a run nor a saved model"),
    (["audit", "nowhere"], 4, "neither a run nor a saved model"),
    (["evaluate-judgements", "nowhere", "file.txt"], 4, "neither a run nor a saved model"),
    (["evaluate-foils", "nowhere"], 4, "neither a run nor a saved model"),
    (["guide", "build", "nowhere", "-o", "guide"], 4, "neither a run nor a saved model"),
    (["index", "nowhere", "scenes"], 4, "neither a run nor a saved model"),
    (["index", "add", "nowhere", "scenes"], 3, "not a search index"),
    (["index", "info", "nowhere"], 3, "not a search index"),
    (["search", "nowhere", "a dog"], 3, "not a search index"),
]  # fmt: skip

BOUNDS = [
    ["audit", "run", "--threshold", "0"],
    ["audit", "run", "--threshold", "-0.1"],
    ["audit", "run", "--threshold", "1.1"],
    ["audit", "run", "--threshold", "nan"],
    ["audit", "run", "--fail-above", "nan"],
    ["audit", "run", "--fail-above", "1.5"],
    ["audit", "run", "--max-suspicious", "-1"],
    ["audit", "run", "--examine", "1"],
    ["audit", "run", "--details", "-1"],
    ["search", "index", "a dog", "-k", "0"],
    ["search", "index", "a dog", "--shortlist-size", "0"],
    ["search", "index", "a dog", "--explain", "-1"],
    ["evaluate", "run", "--folds", "-1"],
    ["evaluate", "run", "--bootstrap", "-1"],
    ["evaluate", "run", "--shortlist-size", "0"],
    ["evaluate", "run", "--foils-per-caption", "0"],
    ["evaluate", "run", "--max-captions", "0"],
    ["correct", "run", "photo.png", "a dog", "--threshold", "nan"],
    ["correct", "run", "photo.png", "a dog", "--candidates", "0"],
    ["index", "run", "scenes", "--shortlist-size", "0"],
    ["index", "run", "scenes", "--recall-queries", "-1"],
    ["index", "recall", "index", "--queries", "0"],
    ["foils", "run", "photo.png", "a dog", "--temperature", "0"],
    ["evaluate-foils", "run", "--temperature", "inf"],
    ["data", "inspect", "scenes", "--limit", "-1"],
    ["features", "photos", "-o", "out", "--workers", "0"],
]


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """What all of them answer, in one process that has not imported torch."""
    commands = [words for words, _, _ in TYPOS] + BOUNDS
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results(printed) -> list[tuple[int, str, bool]]:
    return [tuple(result) for result in printed["results"]]


@pytest.mark.parametrize("number", range(len(TYPOS)), ids=[" ".join(t[0]) for t in TYPOS])
def test_a_typo_is_found_before_torch_is_imported(results, number: int) -> None:
    _, code, message = TYPOS[number]
    assert results[number][0] == code, results[number]
    assert message in results[number][1]
    assert not results[number][2]


OPTIONS = """
import json
from counterfoil.core.config import load_config
from counterfoil.core.unknown_names import check_names
from counterfoil.core.unread_options import PARTS
from counterfoil.core.registry import declared
read = {part: declared(*place) for part, place in PARTS.items()}
from counterfoil.core.recipes import recipe_names
for recipe in recipe_names():
    check_names(load_config(recipe))
from counterfoil.encoders import image_encoders, text_encoders
from counterfoil.matchers import matchers
real = {"image": image_encoders, "text": text_encoders, "matcher": matchers}
print(json.dumps([
    [part, name, read[part][name], list(real[part].options(name))]
    for part in real for name in real[part]
]))
"""


@pytest.mark.slow
def test_what_the_source_says_of_a_models_parts_is_what_they_take() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPTIONS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    assert {part for part, *_ in entries} == {"image", "text", "matcher"}
    for part, name, read, real in entries:
        assert (read or []) == real, (part, name)


@pytest.mark.parametrize("number", range(len(BOUNDS)), ids=[" ".join(b) for b in BOUNDS])
def test_a_number_out_of_bounds_is_refused_when_it_is_parsed(results, number: int) -> None:
    code, output, torch_is_imported = results[len(TYPOS) + number]
    assert code == 2, output
    assert BOUNDS[number][-2].strip("-") in output
    assert not torch_is_imported


def test_what_is_declared_in_the_source_is_what_is_registered(printed) -> None:
    """Read in the process without torch: where a package is imported, nothing is declared."""
    read = printed["declared"]
    assert list(models) == sorted(read["models"])
    assert list(objectives) == sorted(read["objectives"])
    for name, options in read["objectives"].items():
        assert options is None or options == list(objectives.options(name)), name
    assert sum(options is not None for options in read["objectives"].values()) > 10


def test_option_means_the_data_source_in_every_command() -> None:
    def helps(command: Any, name: str, place: str = "counterfoil") -> dict[str, str]:
        """Help of an option in each command that has it."""
        told = {}
        for parameter in command.params:
            if name in parameter.opts:
                told[place] = parameter.help
        for sub, below in getattr(command, "commands", {}).items():
            told |= helps(below, name, f"{place} {sub}")
        return told

    command = get_command(app)
    told = helps(command, "--option")
    assert set(told.values()) == {"Option of the data source, as key=value. Repeatable."}
    named = {"counterfoil data inspect", "counterfoil features", "counterfoil audit check"}
    assert named <= set(told)
    backbone = helps(command, "--backbone-option")
    assert list(backbone) == ["counterfoil features"]
    assert "Option of the backbone" in backbone["counterfoil features"]


def test_features_reads_its_data_with_option_and_its_backbone_with_backbone_option(
    tmp_path: Path,
) -> None:
    place = ["--cache", str(tmp_path / "cache"), "-o", str(tmp_path / "out"), "-b", "segments"]
    own = ["--backbone-option", "side=32", "--backbone-option", "max_fragments=3"]
    result = CliRunner().invoke(
        app,
        ["features", "scenes", *place, "--option", "images=[4, 2, 2]", "--json", *own],
    )
    assert result.exit_code == 0, result.output
    manifest = json.loads(result.stdout)
    assert {name: split["images"] for name, split in manifest["splits"].items()} == {
        "train": 4,
        "dev": 2,
        "test": 2,
    }
    assert manifest["extractor"]["options"] == {"side": 32, "max_fragments": 3}
    with pytest.raises(ConfigError, match="--backbone-option"):
        CliRunner().invoke(
            app,
            ["features", "scenes", *place, "--overwrite", "--option", "side=32"],
            catch_exceptions=False,
        )


def _train(*words: object) -> str:
    result = CliRunner().invoke(app, ["train", *map(str, words)], catch_exceptions=False)
    return result.output


def test_a_recipe_beside_the_run_to_resume_is_understood_or_the_answer_says_what_to_do(
    tmp_path: Path,
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text("model: {name: vse++, embed_size: 32}\nseed: 3\n")
    run.mkdir()
    (run / "config.yaml").write_text(_train(recipe, "--show-config"))
    shown = _train(recipe, "--resume", run, "--show-config")
    assert "seed: 3" in shown
    assert _train("--resume", run, "--show-config") == shown
    assert _train(recipe, "--resume", "--out", run, "--show-config") == shown
    with pytest.raises(ConfigError, match="started with another seed"):
        _train(recipe, "--resume", run, "seed=4", "--show-config")
    with pytest.raises(ConfigError, match="one run, got"):
        _train(recipe, "--resume", run, "--out", tmp_path / "other", "--show-config")
    with pytest.raises(ConfigError, match=r"--resume RUN"):
        _train(recipe, run, "--show-config")
    with pytest.raises(CheckpointError, match="no run there to resume"):
        _train(recipe, "--resume", tmp_path / "nowhere", "--show-config")
