"""A cross-encoder behind a fast run: `evaluate --retriever`, `index --retriever` and `search`."""

from __future__ import annotations

import json

import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.data.images import open_image
from counterfoil.models import create_model, save_pretrained
from counterfoil.training.run_data import read_data
from tests.cli.test_cli import invoke
from tests.cli.test_correct import SCENES, run_folder


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


@pytest.fixture(scope="module")
def slow(pairs, tmp_path_factory):
    return run_folder(pairs, tmp_path_factory.mktemp("runs") / "slow", [])


@pytest.fixture(scope="module")
def fast(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "my-vse"
    section = {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}}
    config = build_config({"data": SCENES, "model": section})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    model.fragments_from = "segments"
    save_pretrained(model, folder / "best")
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


def test_evaluation_reports_both_stages(slow, fast, cache, tmp_path) -> None:
    asked = ["evaluate", slow, "--retriever", fast, "--bootstrap", 0, "--cache", cache]
    few = json.loads(invoke(*asked, "--shortlist-size", 4, "--json"))
    assert few["shortlist"]["retriever"] == "my-vse"
    assert few["shortlist"]["shortlist_size"] == 4
    assert few["t2i"]["recalls"]["1"] <= few["shortlist"]["t2i_recall"]
    assert few["i2t"]["recalls"]["1"] <= few["shortlist"]["i2t_recall"]
    assert few["shortlist"]["scored"] < few["shortlist"]["pairs"]
    whole = json.loads(invoke("evaluate", slow, "--bootstrap", 0, "--cache", cache, "--json"))
    everything = json.loads(invoke(*asked, "--shortlist-size", 1000, "--json"))
    assert everything.pop("shortlist")["t2i_recall"] == 100.0
    assert everything["rsum"] == pytest.approx(whole["rsum"])
    shown = " ".join(invoke(*asked, "--shortlist-size", 4).split())
    assert "answer on the list" in shown
    assert "pairs scored by the second stage" in shown
    assert "| shortlists of my-vse |" in invoke(*asked, "--markdown", "--out", tmp_path / "r.md")
    assert "shortlists of my-vse" in (tmp_path / "r.md").read_text()


def test_a_shortlist_is_not_for_several_runs_apart(slow, fast) -> None:
    with pytest.raises(ConfigError, match="--separately"):
        invoke("evaluate", slow, "--retriever", fast, "--separately")


def test_a_shortlist_of_other_pairs_is_refused(slow, fast, pairs, cache, tmp_path) -> None:
    other = tmp_path / "other"
    save_pretrained(
        create_model(build_config({"model": "vse-fc"}).model, pairs.train), other / "best"
    )
    tree = {"data": {**SCENES, "options": {"images": [2, 1, 1]}}, "model": "vse-fc"}
    (other / "config.yaml").write_text(build_config(tree).to_yaml())
    with pytest.raises(ConfigError, match="different images or captions"):
        invoke("evaluate", slow, "--retriever", other, "--cache", cache)


def test_an_index_of_two_runs_is_searched_both_ways(slow, fast, pairs, cache, tmp_path) -> None:
    index = tmp_path / "index"
    told = invoke(
        "index", slow, "--retriever", fast, "--split", "test", "--out", index, "--cache", cache
    )
    assert "vectors of vse-fc" in told
    assert "recall@10" in told
    found = json.loads(invoke("search", index, "a red car next to a tree", "-k", 3, "--json"))
    assert found["model"] == "uniter-small"
    assert all(0 <= hit["score"] <= 1 for hit in found["hits"])
    open_image(pairs["test"].pixels[3]).save(tmp_path / "scene.png")
    for image in (tmp_path / "scene.png", pairs["test"].ids[3]):
        back = json.loads(invoke("search", index, "--image", image, "-k", 3, "--json"))
        assert len(back["hits"]) == 3
    shown = json.loads(invoke("index", "info", index, "--json"))
    assert shown["first_model"]["name"] == "vse-fc"
