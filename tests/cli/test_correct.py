"""`counterfoil correct`: the words, the sentence before and after, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from counterfoil.config import build_config
from counterfoil.data.images import open_image
from counterfoil.errors import ConfigError
from counterfoil.models import create_model, save_pretrained
from counterfoil.progress import Silent
from counterfoil.training.run import read_data
from tests.cli.test_cli import invoke

SCENES = {"source": "scenes", "options": {"images": [20, 4, 16]}, "min_count": 1}
SENTENCE = "A man on a red bicycle, next to a tree."


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


def run_folder(pairs, folder, heads: list[str]):
    """An untrained run, complete on disk."""
    matcher = {"layers": 1, "heads": 2, "extras": heads}
    section = {"name": "uniter-small", "embed_size": 16, "matcher": matcher}
    config = build_config({"data": SCENES, "model": section})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.fragments_from = "segments"
    save_pretrained(model, folder / "best")
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    return run_folder(pairs, tmp_path_factory.mktemp("run"), ["discrimination", "correction"])


def test_a_sentence_about_an_image_of_the_data_is_corrected(run, pairs, cache) -> None:
    asked = ["correct", run, pairs["test"].ids[3], SENTENCE, "--threshold", 0, "--cache", cache]
    shown = " ".join(invoke(*asked).split())
    told = json.loads(invoke(*asked, "--json"))
    assert told["text"] == SENTENCE
    assert told["corrected_score"] >= told["score"]
    assert told["corrected"] in shown
    assert f"{told['score']:.4f}" in shown
    assert [word["word"] for word in told["words"]][:3] == ["A", "man", "on"]
    assert told["changes"] or told["refused"]
    for change in told["refused"]:
        assert f"'{change['instead']}'" in shown


def test_an_image_file_is_read_as_the_run_reads_images(run, pairs, cache, tmp_path) -> None:
    path = tmp_path / "scene.png"
    open_image(pairs["test"].pixels[3]).save(path)
    by_file = json.loads(invoke("correct", run, path, SENTENCE, "--json"))
    by_id = invoke("correct", run, pairs["test"].ids[3], SENTENCE, "--cache", cache, "--json")
    assert by_file["score"] == pytest.approx(json.loads(by_id)["score"], abs=1e-3)


def test_a_model_without_the_heads_is_refused(pairs, tmp_path, cache) -> None:
    plain, image = run_folder(pairs, tmp_path, []), pairs["test"].ids[0]
    with pytest.raises(ConfigError, match="tags-dc"):
        invoke("correct", plain, image, SENTENCE, "--cache", cache)
    with pytest.raises(ConfigError, match="empty"):
        invoke("correct", plain, image, " ")
