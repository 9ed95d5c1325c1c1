"""Small trained models and indexes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import counterfoil as cf
from counterfoil.search import SearchIndex

SMALL = {"embed_size": 24, "text": {"word_dim": 12}}
NAMES = ("vse-fc", "naaf", "chan")


@pytest.fixture(scope="session")
def models(concepts):
    """By name; untrained, which is all that searching exactly needs."""
    torch.manual_seed(0)
    return {name: cf.create(name, concepts, **SMALL).eval() for name in NAMES}


@pytest.fixture(scope="session")
def indexes(models, concepts, tmp_path_factory):
    """An index of the test images by the name of its model; not to be changed."""
    folder = tmp_path_factory.mktemp("indexes")
    return {
        name: SearchIndex.build(folder / name, model, concepts.test, dtype="float32")
        for name, model in models.items()
    }


@pytest.fixture
def fresh(models, concepts, tmp_path):
    """An index of naaf with the first 12 test images, to be changed."""
    return SearchIndex.build(
        tmp_path / "fresh", models["naaf"], concepts.test.select(range(12)), dtype="float32"
    )


def with_captions(split, texts):
    """The split, each image captioned anew."""
    return replace(split, captions=[list(texts)] * len(split))
