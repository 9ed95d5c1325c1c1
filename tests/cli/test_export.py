"""`counterfoil export`, from a run to a folder that scores."""

from __future__ import annotations

import json

import numpy as np
import pytest

from counterfoil.core.errors import ConfigError
from counterfoil.models.export import OnnxMatcher
from counterfoil.training.run_folder import load_model
from tests.cli.test_cli import invoke
from tests.cli.test_search import pairs, run  # noqa: F401 - fixtures


def test_a_run_is_exported_and_scores_as_before(run, pairs, tmp_path) -> None:  # noqa: F811
    out = tmp_path / "onnx"
    printed = invoke("export", run, "--out", out)
    assert "scorer.onnx" in printed
    assert "images, regions, region_width" in printed
    model, images = load_model(run, "cpu"), [pairs.test.fragments.read(i) for i in range(3)]
    captions = pairs.test.texts[:2]
    scores = OnnxMatcher(out).score(images, captions)
    assert np.abs(scores - model.score(images, captions).numpy()).max() <= 1e-4
    with pytest.raises(ConfigError, match="already holds an exported model: --overwrite"):
        invoke("export", run, "--out", out)
    described = json.loads(invoke("export", run, "--out", out, "--overwrite", "--json"))
    assert described["fragments"]["extractor"] == "segments"
    assert described["difference"] <= 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["onnx"]  # nothing is left beside it


def test_a_folder_of_something_else_is_not_replaced(run, tmp_path) -> None:  # noqa: F811
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not an exported model"):
        invoke("export", run, "--out", tmp_path, "--overwrite")
    assert (tmp_path / "notes.txt").read_text() == "mine"
