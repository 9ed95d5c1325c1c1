"""A cross-encoder searches behind another model's vectors: both ways, on disk, after changes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import counterfoil as cf
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.scoring.encode import score_split
from counterfoil.search import SearchIndex

CROSS = {"embed_size": 16, "matcher": {"layers": 1, "heads": 2}}


@pytest.fixture(scope="module")
def cross(concepts):
    torch.manual_seed(0)
    model = cf.create("uniter-small", concepts, **CROSS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def index(cross, models, concepts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "index"
    return SearchIndex.build(
        folder, cross, concepts.test, retriever=models["vse-fc"], dtype="float32", shortlist_size=5
    )


def ranked(scores: np.ndarray, names: list[str]) -> list[str]:
    return [names[place] for place in np.argsort(-scores, kind="stable")]


def test_the_other_model_finds_the_shortlist_and_the_cross_encoder_ranks_it(
    index, cross, models, concepts
) -> None:
    split = concepts.test
    fast, slow = (score_split(m, split).scores.numpy() for m in (models["vse-fc"], cross))
    for text in (0, 7, 40):
        result = index.search(split.texts[text], k=5)
        listed = ranked(fast[:, text], list(split.ids))[:5]
        by_first = sorted(result.hits, key=lambda hit: hit.first_rank)
        assert [hit.id for hit in by_first] == listed
        of = {name: slow[list(split.ids).index(name), text] for name in listed}
        assert [hit.id for hit in result.hits] == sorted(listed, key=lambda name: -of[name])
        for hit in result.hits:
            assert hit.score == pytest.approx(float(of[hit.id]), abs=1e-5)
            row = list(split.ids).index(hit.id)
            assert hit.first_score == pytest.approx(float(fast[row, text]), abs=1e-5)


def test_an_image_asks_for_captions_in_the_same_way(index, models, concepts) -> None:
    split = concepts.test
    fast = score_split(models["vse-fc"], split).scores.numpy()
    result = index.search(image=split.ids[3], k=5)
    names = [f"{image}#{n}" for image in split.ids for n in range(2)]
    assert {hit.id for hit in result.hits} == set(ranked(fast[3], names)[:5])


def test_likeness_within_a_side_is_the_other_models(index, models, concepts) -> None:
    text = concepts.test.texts[0]
    result = index.search(text, target="captions", k=1)
    assert result.hits[0].text == text
    assert result.hits[0].score == pytest.approx(1.0, abs=1e-4)


def test_recall_is_measured_against_the_cross_encoder_over_everything(index) -> None:
    few, all_of_them = index.recall(8, shortlist_size=3), index.recall(8, shortlist_size=64)
    assert all(way.at[1] == 1.0 and way.at[10] == 1.0 for way in all_of_them)
    assert min(way.at[1] for way in few) < 1.0


def test_an_index_opened_again_has_both_models_and_takes_more(index, concepts, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(index.folder, folder)
    again = SearchIndex.open(folder, device="cpu")
    command = concepts.test.texts[5]
    assert [h.id for h in again.search(command).hits] == [h.id for h in index.search(command).hits]
    assert again.info()["first_model"]["name"] == "vse-fc"
    added = again.add(concepts.dev.select(range(4)))
    assert (added.images, added.captions) == (4, 8)
    own = again.search(concepts.dev.texts[0], exhaustive=True, k=36)
    assert concepts.dev.ids[0] in {hit.id for hit in own.hits}
    assert again.search(concepts.dev.texts[0], k=3, explain=1).hits[0].match is not None


def test_a_changed_first_model_is_refused(index, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(index.folder, folder)
    weights = folder / "first" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointError, match="first: not the model"):
        SearchIndex.open(folder, device="cpu")


def test_models_that_cannot_search_together_are_refused(cross, models, concepts, tmp_path) -> None:
    def build(model, first, **more):
        SearchIndex.build(tmp_path / "index", model, concepts.test, retriever=first, **more)

    with pytest.raises(ConfigError, match="no whole vectors"):
        build(cross, models["naaf"])
    with pytest.raises(ConfigError, match="its own first stage"):
        build(models["vse-fc"], models["vse-fc"])
    with pytest.raises(ConfigError, match="give one of them"):
        build(cross, models["vse-fc"], first_stage="pooled")
    other = cf.create("vse-fc", concepts, embed_size=8)
    other.fragments_from = "grid"
    with pytest.raises(ConfigError, match="same features"):
        build(cross, other)
    assert not (tmp_path / "index").exists()
