"""A table of two rows, two seeds and very few scenes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from counterfoil.reproduce.plan import Plan, Settings, make_plan
from counterfoil.reproduce.spec import build_artifact

TINY: dict[str, Any] = {
    "name": "tiny",
    "kind": "table",
    "title": "A tiny table",
    "summary": "two losses",
    "paper": "Nobody 2000",
    "data_sets": {"f30k": {"title": "Flickr30K", "detect": ["f30k"]}},
    "base": {
        "common": {
            "model": {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}},
            "train": {"epochs": 2, "batch_size": 24, "device": "cpu", "log_every": 1},
            "evaluation": {"bootstrap": 0},
        },
        "scenes": {"data": {"min_count": 1, "options": {"images": [24, 8, 12], "captions": 2}}},
    },
    "runs": {
        "all": {"common": {"objective": {"triplet": {"margin": 0.2}}}},
        "hard": {"common": {"objective": {"hardest": {"margin": 0.2}}}},
    },
    "columns": ["Loss"],
    "rows": [
        {"label": ["all"], "run": "all", "published": {"f30k": [1.0, 2, 3, 4, 5, 6, 21]}},
        {"label": ["hard"], "run": "hard"},
    ],
}


def tiny(**change: Any) -> dict[str, Any]:
    """The tiny table with some of its keys replaced; None takes one away."""
    tree = copy.deepcopy(TINY) | change
    return {key: value for key, value in tree.items() if value is not None}


def planned(tree: dict[str, Any], out: Path, seeds: int = 1, **settings: Any) -> Plan:
    given = Settings(seeds=seeds, published=settings.pop("published", "f30k"), **settings)
    return make_plan(build_artifact(tree, "tiny.yaml"), given, out)


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs for all tests: what one has trained, the others find."""
    return tmp_path_factory.mktemp("reproduce")
