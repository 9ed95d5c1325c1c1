"""The example with Ray Data makes the features of one process."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from counterfoil.data import load_pairs
from counterfoil.features.build import build_features
from tests.features.tiny_networks import photos
from tests.holding import content

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_features.py"


@pytest.mark.slow
def test_ray_data_makes_the_features_of_one_process(tmp_path, monkeypatch) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    photos(tmp_path / "photos", 12)
    table = tmp_path / "photos" / "captions.csv"
    lines = [f"{number}.png,a picture,train" for number in range(12)]
    table.write_text("\n".join(["image,caption,split", *lines]) + "\n")
    options = {"side": 32, "max_fragments": 4}
    example = runpy.run_path(str(EXAMPLE))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        example["extract"](str(table), str(tmp_path / "ray"), 3, 1, "segments", options)
    finally:
        ray.shutdown()
    build_features(
        load_pairs(table), tmp_path / "whole", "segments", options, cache_dir=None, workers=1
    )
    assert content(tmp_path / "ray") == content(tmp_path / "whole")
