"""The service finds what an exhaustive search of the index finds, with what it holds in memory."""

from __future__ import annotations

import pytest
import torch

import counterfoil as cf
from counterfoil.app import searcher
from counterfoil.app.searcher import Searcher
from counterfoil.scoring.encode import encode_texts
from counterfoil.search import SearchIndex, items


@pytest.fixture(params=["vse-fc", "naaf"])
def index(request, concepts, tmp_path) -> SearchIndex:
    torch.manual_seed(0)
    model = cf.create(request.param, concepts, embed_size=24, text={"word_dim": 12}).eval()
    return SearchIndex.build(tmp_path / "index", model, concepts.test, dtype="float32")


def test_items_in_memory_are_found_as_by_an_exhaustive_search(index, concepts, monkeypatch) -> None:
    monkeypatch.setattr(items, "BLOCK_ITEMS", 5)
    monkeypatch.setattr(searcher, "JOINED_BLOCKS", 3)
    service = Searcher(index)
    sizes = [len(keys) for keys, _ in service.cached["images"]]
    assert sizes == ([15, 15, 2] if index.model.spec.name == "vse-fc" else [5] * 6 + [2])
    texts = concepts.test.texts[:4]
    encoded = encode_texts(index.model, texts)
    for text, hits in zip(
        texts, service.search("captions", "images", encoded, [7] * 4), strict=True
    ):
        wanted = index.search(text, k=7, exhaustive=True).hits
        assert [hit["id"] for hit in hits] == [hit.id for hit in wanted]
        torch.testing.assert_close([h["score"] for h in hits], [h.score for h in wanted])
