"""Backbones through the cache: the same bytes however the work was done, and crops of a base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from counterfoil.core.errors import ConfigError
from counterfoil.data.images import open_image
from counterfoil.data.pairs import Pairs
from counterfoil.features import Crops, TransformersFeatures, extract, extractors, with_fragments
from counterfoil.features.cache import cache_contents
from counterfoil.features.chunks import _fill
from counterfoil.features.extractors import full_name, split_full_name
from tests.features.test_extract import Recorder, arrays
from tests.features.tiny_networks import photos, picture, save_network

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_network(tmp_path_factory.mktemp("network") / "vit", "vit"))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "_CHUNK", 8)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs("mine", {"train": photos(tmp_path_factory.mktemp("photos"), 21)})


def test_fragments_on_disk_are_those_of_the_network(mine: Pairs, tmp_path: Path, model) -> None:
    made = with_fragments(mine, tmp_path, "transformers", {"model": model}).train
    tool = TransformersFeatures(model=model)
    assert made.fragments is not None
    assert made.pixels is not None
    assert made.fragments.features.dtype == np.float16
    assert made.fragments.features.shape == (21, 17, 16)
    for row in (0, 7, 8, 20):
        expected = tool.extract(open_image(made.pixels[row]))
        result = made.fragments.read(row)
        np.testing.assert_allclose(result.features, expected.features, atol=2e-3)
        np.testing.assert_array_equal(result.boxes, expected.boxes)


@pytest.mark.parametrize("stop", [1, 9, 17])
def test_threads_and_interruptions_change_no_byte(mine, tmp_path, model, stop: int) -> None:
    options = {"model": model}
    whole = with_fragments(mine, tmp_path / "whole", "transformers", options, workers=1)
    with pytest.raises(KeyboardInterrupt):
        with_fragments(mine, tmp_path, "transformers", options, Recorder(stop), workers=3)
    rest = Recorder()
    made = with_fragments(mine, tmp_path, "transformers", options, rest, workers=3)
    assert rest.seen == 21 - stop // 8 * 8
    assert arrays(made) == arrays(whole)


def test_the_cache_names_the_fingerprint(mine: Pairs, tmp_path: Path, model: str) -> None:
    with_fragments(mine, tmp_path, "transformers", {"model": model})
    (contents,) = cache_contents(tmp_path)
    assert contents.images == 21
    assert contents.extractor == TransformersFeatures(model=model).fingerprint()


def test_bad_images_among_good_ones_are_left_out(tmp_path: Path, model: str) -> None:
    split = photos(tmp_path / "photos", 11)
    (tmp_path / "photos" / "2.png").write_bytes(b"")
    (tmp_path / "photos" / "9.png").write_bytes(b"GIF89a")
    pairs = Pairs("mine", {"train": split})
    made = with_fragments(pairs, tmp_path / "cache", "transformers", {"model": model})
    assert list(made.train.ids) == ["0", "1", "3", "4", "5", "6", "7", "8", "10"]
    assert [problem.where for problem in made.problems] == ["train/2", "train/9"]
    tool = TransformersFeatures(model=model)
    assert made.train.fragments is not None
    expected = tool.extract(picture(3)).features
    np.testing.assert_allclose(made.train.fragments.read(2).features, expected, atol=2e-3)


def test_the_size_of_a_batch_changes_nothing_to_speak_of(model: str) -> None:
    views = [TransformersFeatures(model=model).views(picture(seed)) for seed in range(5)]
    one, many = (TransformersFeatures(model=model, batch_size=size).run(views) for size in (1, 4))
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a.features, b.features, atol=1e-5)


def test_numbers_too_large_for_half_precision_stay_finite(model: str) -> None:
    tool = TransformersFeatures(model=model)
    result = tool.extract(picture(1))
    result.features[0, 0], result.features[0, 1] = 1e9, -1e9
    chunk = _fill(tool, [result])
    assert chunk.features[0, 0, :2].tolist() == [65504, -65504]
    result.features[3, 3] = np.nan
    chunk = _fill(tool, [result])
    assert "not finite" in chunk.bad[0]
    assert chunk.lengths[0] == 0


def test_a_device_that_is_not_there_is_refused(mine: Pairs, tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        with_fragments(mine, tmp_path, "transformers", {"model": model}, device="abacus")


def test_crops_are_the_base_seeing_each_window(model: str) -> None:
    options = {"model": model}
    crops = Crops(base="transformers", base_options=options, scales=(1.0, 0.5))
    image = picture(4, 64, 48)
    result = crops.extract(image)
    assert (crops.max_fragments, crops.dim) == (10, 16)
    assert result.boxes is not None
    base = TransformersFeatures(model=model)
    for features, (x1, y1, x2, y2) in zip(result.features, result.boxes, strict=True):
        part = image.crop((round(x1 * 64), round(y1 * 48), round(x2 * 64), round(y2 * 48)))
        np.testing.assert_allclose(features, base.extract(part).features[0], atol=1e-4)
    assert result.boxes[0].tolist() == [0, 0, 1, 1]
    assert len({tuple(box) for box in result.boxes.tolist()}) == 10


def test_crops_of_a_pixel_or_a_thread_are_still_crops(model: str) -> None:
    crops = Crops(base="transformers", base_options={"model": model}, scales=(1.0, 0.3))
    for size in ((1, 1), (900, 1), (2, 500)):
        assert np.isfinite(crops.extract(picture(0, *size)).features).all()


def test_crops_refuse_what_they_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a network"):
        Crops(base="segments")
    with pytest.raises(ConfigError, match="scales"):
        Crops(scales=[])
    with pytest.raises(ConfigError, match="windows"):
        Crops(scales=[0.05])
    detector = save_network(tmp_path / "detr", "detr")
    tool = Crops(base="transformers", base_options={"model": str(detector), "size": 40})
    with pytest.raises(ConfigError, match="no vector for a whole picture"):
        tool.extract(picture(1))


def test_a_name_with_options_makes_the_same_extractor(model: str) -> None:
    name = full_name("transformers", {"model": model, "layer": 0})
    assert split_full_name(name) == ("transformers", {"layer": 0, "model": model})
    made = extractors.create(name, {})
    assert made.fingerprint() == TransformersFeatures(model=model, layer=0).fingerprint()
    assert split_full_name("an extractor {of old") == ("an extractor {of old", {})
