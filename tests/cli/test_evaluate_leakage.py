"""A run that is judged by images that it was trained on says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.config import load_config
from counterfoil.data import load_pairs
from counterfoil.training.run import _leakage_warning, shared_ids
from tests.data.tiny import write_lines, write_scan

runner = CliRunner()
SMALL = [
    "data.format=scan", "data.min_count=1", "model.embed_size=8", "model.text.word_dim=8",
    "train.epochs=1", "train.batch_size=4", "train.device=cpu", "evaluation.bootstrap=0",
]  # fmt: skip


def write_data(folder: Path, shared: int) -> Path:
    for split, images in (("train", 8), ("dev", 4), ("test", 4)):
        write_scan(folder, split, images, each=2)
        ids = [f"{split}-{n}" for n in range(images)]
        if split != "train":
            ids[:shared] = [f"train-{n}" for n in range(shared)]
        write_lines(folder / f"{split}_ids.txt", ids)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on leaking data, and what it said."""
    root = tmp_path_factory.mktemp("leaking")
    data = write_data(root / "data", shared=3)
    args = ["train", f"data.source={data}", *SMALL, "--out", str(root / "run"), "--json"]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    return root, result


def test_training_warns_of_images_that_are_in_the_splits_that_judge_it(run) -> None:
    root, result = run
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert len(lines) == 1
    assert "3 image ids of 'dev', 3 image ids of 'test' are also in the training split" in lines[0]
    assert "3 image ids are in both 'dev' and 'test'" in lines[0]
    assert json.loads(result.stdout)["shared_with_train"] == {"dev": 3, "test": 3}
    assert "3 image ids of &#x27;test" in (root / "run" / "report.html").read_text().replace(
        "&#39;", "&#x27;"
    )


def test_evaluation_warns_of_images_that_the_run_was_trained_on(run, tmp_path) -> None:
    root, _ = run
    same = ["--data", str(root / "data"), "--format", "scan"]
    other = ["--data", str(write_data(tmp_path / "other", 3)), "--format", "scan"]
    for more, count in (([], 1), (same, 1), (other, 0), (["--split", "train"], 0)):
        args = ["evaluate", str(root / "run"), "--bootstrap", "0", "--device", "cpu", *more]
        result = runner.invoke(app, args)
        assert result.exit_code == 0, result.output
        assert result.stderr.count("3 image ids of 'test' are also in the training split") == count


def test_data_without_leakage_are_not_warned_of(tmp_path) -> None:
    data = write_data(tmp_path / "data", shared=0)
    config = load_config(None, [f"data.source={data}", *SMALL])
    pairs = load_pairs(data)
    assert shared_ids(config, pairs) == {}
    assert _leakage_warning(config, pairs) == ""


def test_inspection_shows_what_splits_share(run) -> None:
    root, _ = run
    result = runner.invoke(app, ["data", "inspect", str(root / "data")])
    assert "'train' and 'test' share 3 ids" in result.stdout
