"""Indexes in every precision: the matcher's scores, recall on the scenes, and changes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import counterfoil as cf
from counterfoil.core.errors import DataError
from counterfoil.encoders import Encoded
from counterfoil.encoders.stored import EncodedReader, EncodedWriter, Extent
from counterfoil.search import SearchIndex
from tests.conftest import thinned
from tests.search.test_index import contents

CODED = ("int8", "binary")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return cf.load_pairs("scenes", images=[2, 2, 48], extractor="segments", cache_dir=cache).test


@pytest.fixture(scope="module")
def by_dtype(scenes, tmp_path_factory):
    """Indexes of a trained model in three precisions."""
    folder, model = tmp_path_factory.mktemp("dtypes"), cf.load("scenes-naaf")
    return {
        dtype: SearchIndex.build(folder / dtype, model, scenes, first_stage="maxsim", dtype=dtype)
        for dtype in ("float32", *CODED)
    }


@pytest.mark.parametrize("dtype", thinned(CODED, "binary"))
def test_on_scenes_the_shortlist_has_what_scoring_everything_finds(by_dtype, dtype) -> None:
    images, captions = by_dtype[dtype].recall(24, shortlist_size=16)
    assert (images.target, captions.target) == ("images", "captions")
    assert images.at[1] >= 0.95
    assert images.at[5] >= 0.9
    assert captions.at[1] >= 0.7


@pytest.mark.parametrize("dtype", CODED)
def test_scores_from_codes_are_close_to_those_of_full_precision(by_dtype, scenes, dtype) -> None:
    """In the mean: NAAF has a threshold, and a word that falls below it moves a score by a step."""
    errors, shares = [], []
    for text in scenes.texts[:5]:
        exact, coded = (
            {hit.id: hit.score for hit in by_dtype[name].search(text, k=48, exhaustive=True).hits}
            for name in ("float32", dtype)
        )
        spread = max(exact.values()) - min(exact.values())
        errors += [(coded[name] - exact[name]) / spread for name in exact]
        # results come best first
        shares.append(len(set(list(exact)[:10]) & set(list(coded)[:10])) / 10)
    assert 0 < np.sqrt(np.mean(np.square(errors))) < 0.01
    assert np.median(np.abs(errors)) < 0.001
    assert np.mean(shares) >= 0.95


def test_codes_take_half_the_space_of_half_precision(by_dtype) -> None:
    sizes = {name: index.info()["vectors"]["images"]["bytes"] for name, index in by_dtype.items()}
    assert sizes["int8"] < 0.28 * sizes["float32"]
    assert sizes["binary"] < 0.33 * sizes["float32"]
    assert {name: index.info()["dtype"] for name, index in by_dtype.items()} == {
        name: name for name in by_dtype
    }


@pytest.mark.parametrize("dtype", CODED)
def test_changes_of_a_coded_index_are_those_of_any_other(dtype, models, concepts, tmp_path) -> None:
    split = concepts.test
    index = SearchIndex.build(
        tmp_path / "index", models["naaf"], split.select(range(12)), dtype=dtype
    )
    index.add(split.select(range(12, 32)))
    index.add(split.select(range(4)), existing="update")
    index.remove(["test-9", "test-20#1"])
    before = index.search("a dog and a cat", k=31).hits
    index.compact()
    assert index.check() == []
    again = SearchIndex.open(tmp_path / "index", device="cpu")
    assert contents(again) == contents(index)
    assert len(again) == 31
    for new, old in zip(again.search("a dog and a cat", k=31).hits, before, strict=True):
        assert (new.id, new.first_rank) == (old.id, old.first_rank)
        assert new.score == pytest.approx(old.score, abs=1e-5)


def test_stored_fragments_are_within_half_a_scale(tmp_path) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    fragments = torch.randn(2, 3, 40) * mask[..., None]
    encoded = Encoded(fragments, mask, pooled=torch.randn(2, 40), boxes=torch.rand(2, 3, 4))
    extent = EncodedWriter(tmp_path, "int8", Extent()).append(encoded, np.ones(2, dtype=np.bool_))
    reader = EncodedReader(tmp_path, "int8", extent)
    stored, present = reader.read([1, 0])
    assert present.all()
    for name in ("fragments", "pooled"):
        exact, coded = getattr(encoded, name).flip(0), getattr(stored, name)
        scale = exact.abs().amax(-1, keepdim=True) / 127
        longest = coded.shape[-2] if name == "fragments" else len(coded)
        narrow = exact[:, :longest] if name == "fragments" else exact
        wide = scale[:, :longest] if name == "fragments" else scale
        assert coded.dtype == torch.float32
        assert ((coded - narrow).abs() <= wide * 0.5001 + 1e-7).all()
    assert torch.equal(stored.boxes, encoded.boxes.flip(0)[:, :2] * stored.mask[..., None])
    assert (tmp_path / "fragments.bin").stat().st_size == 3 * 40
    (tmp_path / "fragments_scale.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="cut short"):
        EncodedReader(tmp_path, "int8", extent)


def test_faiss_searches_8_bit_vectors_and_refuses_signs(models, concepts, tmp_path) -> None:
    pytest.importorskip("faiss")
    with pytest.raises(DataError, match="--dtype int8"):
        SearchIndex.build(tmp_path / "index", models["vse-fc"], backend="faiss", dtype="binary")
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    options = {"least": 8, "tail": 2, "kind": "hnsw"}
    index = SearchIndex.build(
        tmp_path / "index",
        models["vse-fc"],
        concepts.test,
        backend="faiss",
        backend_options=options,
        dtype="int8",
    )
    assert index.info()["vectors"]["images"]["in_graph"] == 32
    hits = index.search("a dog and a cat", k=5).hits
    exact = SearchIndex.build(tmp_path / "exact", models["vse-fc"], concepts.test, dtype="float32")
    truth = exact.search("a dog and a cat", k=5).hits
    assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in truth], abs=0.02)
