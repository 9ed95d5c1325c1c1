"""Cells of a chosen number, proportions that are kept, and backbones joined."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.data.pairs import Pairs
from counterfoil.features import EfficientNetLiteFeatures, Joined, extractors, with_fragments
from counterfoil.features.efficientnet_network import EfficientNetLite
from counterfoil.features.extractors import full_name
from tests.features.tiny_networks import photos, picture, save_network

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[str]:
    """Two networks of 16 numbers a patch that see 16 patches each, and a name for each."""
    pytest.importorskip("transformers")
    folders = [save_network(tmp_path_factory.mktemp("net"), kind) for kind in ("vit", "dinov2")]
    return [f'transformers {{"model": "{folder}", "pooled": false}}' for folder in folders]


@pytest.fixture(scope="module")
def network() -> EfficientNetLite:
    torch.manual_seed(0)
    return EfficientNetLite(0).eval()


@pytest.fixture
def untrained(monkeypatch, network) -> None:
    """EfficientNet-Lite0 with weights of no training: the way to its cells is what is tested."""
    monkeypatch.setattr(EfficientNetLiteFeatures, "_network", network)
    monkeypatch.setattr("counterfoil.features.efficientnet.weights_digest", lambda _: "none")


def _pooled_by_hand(cells: np.ndarray, grid: int) -> np.ndarray:
    """Cell (i, j) is the mean of the rows ⌊i·n/g⌋ … ⌈(i+1)·n/g⌉ and the columns alike."""
    n, m, _ = cells.shape
    out = np.zeros((grid, grid, cells.shape[2]))
    for i in range(grid):
        for j in range(grid):
            rows = slice(i * n // grid, -(-(i + 1) * n // grid))
            columns = slice(j * m // grid, -(-(j + 1) * m // grid))
            out[i, j] = cells[rows, columns].mean(axis=(0, 1))
    return out.reshape(grid * grid, -1)


def test_a_grid_is_the_map_averaged_into_so_many_cells(untrained) -> None:
    image = picture(1, 120, 80)
    whole = EfficientNetLiteFeatures(size=128).extract(image).features.reshape(4, 4, -1)
    tool = EfficientNetLiteFeatures(size=128, grid=3)
    result = tool.extract(image)
    assert (tool.max_fragments, tool.dim) == result.features.shape == (9, 1280)
    np.testing.assert_allclose(result.features, _pooled_by_hand(whole, 3), atol=1e-5)
    assert result.boxes is not None
    np.testing.assert_allclose(result.boxes[4], [1 / 3, 1 / 3, 2 / 3, 2 / 3], atol=1e-6)


def test_the_setting_of_nine_by_nine_cells_pooled_to_six_by_six(untrained) -> None:
    tool = EfficientNetLiteFeatures(variant=2, grid=6)
    assert (tool.side, tool.max_fragments, tool.dim) == (260, 36, 1280)
    assert tool.views(picture(2, 300, 200))[0].pixels.shape == (260, 260, 3)


@settings(max_examples=10)
@given(st.integers(20, 200), st.integers(20, 200))
def test_kept_proportions_are_those_of_the_picture(width: int, height: int) -> None:
    tool = EfficientNetLiteFeatures(fit="keep", size=64, grid=2)
    rows, columns, _ = tool.views(picture(3, width, height))[0].pixels.shape
    if max(width, height) <= 2 * min(width, height):
        assert min(rows, columns) == 64
        assert columns / rows == pytest.approx(width / height, rel=0.02)
    assert max(rows, columns) <= 128


@pytest.mark.parametrize(("fit", "planned"), [("squash", True), ("keep", False)])
def test_cudnn_plans_nothing_for_sizes_that_hardly_come_again(fit, planned, monkeypatch) -> None:
    seen: list[bool] = []

    def network(batch):
        seen.append(torch.backends.cudnn.enabled)
        return torch.zeros(len(batch), 1280, 2, 2)

    network.to = lambda device: network
    monkeypatch.setattr(EfficientNetLiteFeatures, "_network", network)
    EfficientNetLiteFeatures(fit=fit, size=64, grid=2).extract(picture(9, 40, 30))
    assert seen == [planned]
    assert torch.backends.cudnn.enabled


def test_pictures_of_any_proportions_have_the_same_number_of_cells(untrained) -> None:
    tool = EfficientNetLiteFeatures(fit="keep", size=64, grid=2)
    for size in ((64, 64), (128, 64), (40, 100)):
        assert tool.extract(picture(4, *size)).features.shape == (4, 1280)


def test_options_change_the_fingerprint_and_defaults_do_not(untrained) -> None:
    plain = EfficientNetLiteFeatures().fingerprint()
    assert "grid" not in plain
    assert "size" not in plain
    told = {
        plain,
        EfficientNetLiteFeatures(grid=6).fingerprint(),
        EfficientNetLiteFeatures(size=320).fingerprint(),
        EfficientNetLiteFeatures(grid=6, fit="keep").fingerprint(),
    }
    assert len(told) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "keep"}, "set grid=6"),
        ({"grid": -1}, "grid within"),
        ({"size": 8}, "size 0 or within"),
    ],
)
def test_cells_that_cannot_be_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EfficientNetLiteFeatures(**options)


def test_joined_fragments_are_those_of_the_parts_after_each_other(parts) -> None:
    tool = Joined(parts=parts)
    image = picture(5, 60, 40)
    result = tool.extract(image)
    alone = [extractors.create(part, {}).extract(image) for part in parts]
    np.testing.assert_array_equal(result.features, np.concatenate([one.features for one in alone]))
    np.testing.assert_array_equal(result.boxes, np.concatenate([one.boxes for one in alone]))
    assert (tool.max_fragments, tool.dim) == result.features.shape


def test_joined_channels_are_the_vectors_of_the_parts_end_to_end(parts) -> None:
    tool = Joined(parts=parts, along="channels", unit=True)
    image = picture(6, 60, 40)
    result = tool.extract(image)
    alone = [extractors.create(part, {}).extract(image) for part in parts]
    assert (tool.max_fragments, tool.dim) == result.features.shape == (16, 32)
    for number, one in enumerate(alone):
        half = result.features[:, 16 * number : 16 * (number + 1)]
        np.testing.assert_allclose(np.linalg.norm(half, axis=1), 1, atol=1e-5)
        length = np.linalg.norm(one.features, axis=1, keepdims=True)
        np.testing.assert_allclose(half * length, one.features, atol=1e-4)
    np.testing.assert_array_equal(result.boxes, alone[0].boxes)


def test_joined_parts_fill_a_data_set(parts, tmp_path) -> None:
    pairs = Pairs("some", {"train": photos(tmp_path / "photos", 5)})
    made = with_fragments(pairs, tmp_path / "cache", "joined", {"parts": parts})
    fragments = made["train"].fragments
    assert fragments is not None
    assert fragments.read(3).features.shape == (32, 16)
    assert fragments.made_by == full_name("joined", {"parts": parts})
    again = extractors.create(fragments.made_by, {})
    assert again.fingerprint() == Joined(parts=parts).fingerprint()


def test_a_part_may_be_joined_itself(parts) -> None:
    inner = "joined " + json.dumps({"parts": parts})
    image = picture(7, 50, 70)
    alone = Joined(parts=parts).extract(image)
    along = Joined(parts=[inner, inner], along="channels")
    np.testing.assert_array_equal(
        along.extract(image).features, np.concatenate([alone.features] * 2, axis=1)
    )
    assert (along.max_fragments, along.dim) == (32, 32)
    after = Joined(parts=[parts[0], inner]).extract(image)
    np.testing.assert_array_equal(after.features[16:], alone.features)
    np.testing.assert_array_equal(after.features[:16], alone.features[:16])
    assert after.boxes is not None
    assert along.fingerprint() != Joined(parts=[parts[0], inner]).fingerprint()


def test_parts_that_do_not_fit_are_named(parts) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        Joined(parts=parts[:1])
    with pytest.raises(ConfigError, match="not a network"):
        Joined(parts=[parts[0], "segments"])
    crops = 'crops {"base": "efficientnet-lite", "scales": [1.0]}'
    with pytest.raises(ConfigError, match="as many fragments, got 16, 17"):
        _ = Joined(parts=[parts[0], parts[0].replace("false", "true")], along="channels").dim
    assert Joined(parts=["efficientnet-lite", crops]).along == "fragments"


@pytest.mark.slow
def test_vectors_of_other_places_are_not_put_end_to_end(parts, untrained) -> None:
    grid = 'efficientnet-lite {"size": 64, "grid": 1}'
    windows = 'crops {"base_options": {"size": 64}, "scales": [0.5]}'
    count = extractors.create(windows, {}).max_fragments
    cells = [grid] * count
    orders = [json.dumps({"parts": order}) for order in ([*cells, windows], [windows, *cells])]
    wrong = Joined(parts=[f"joined {order}" for order in orders], along="channels")
    with pytest.raises(ConfigError, match="the same boxes in the same order"):
        wrong.extract(picture(10, 60, 40))
