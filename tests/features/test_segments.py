"""The extractor "segments": finds drawn things, and survives any picture."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from counterfoil.core.errors import ConfigError
from counterfoil.data.scenes import draw, make_scene
from counterfoil.features import Segments, extractors
from counterfoil.features.regions import connected, mask_components


def check(image: Image.Image, tool: Segments) -> None:
    result = tool.extract(image)
    assert 1 <= len(result) <= tool.max_fragments
    assert result.features.shape == (len(result), tool.dim)
    assert result.features.dtype == np.float32
    assert np.isfinite(result.features).all()
    assert np.abs(result.features).max() <= 4
    assert result.boxes is not None
    assert result.boxes.shape == (len(result), 4)
    assert (result.boxes >= 0).all()
    assert (result.boxes <= 1).all()
    assert (result.boxes[:, 2:] > result.boxes[:, :2]).all()


DEGENERATE = {
    "one pixel": Image.new("RGB", (1, 1), "red"),
    "one colour": Image.new("RGB", (300, 200), (9, 9, 9)),
    "grey": Image.linear_gradient("L"),
    "transparent": Image.new("RGBA", (40, 40), (0, 0, 0, 0)),
    "palette": Image.new("P", (30, 60)),
    "very wide": Image.new("RGB", (5000, 3), "white"),
    "very tall": Image.new("RGB", (2, 3000), "blue"),
    "noise": Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8)),
    "stripes": Image.fromarray(np.tile(np.array([[0], [255]], np.uint8), (60, 120))),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_any_picture_gives_finite_fragments(name: str) -> None:
    check(DEGENERATE[name], Segments())


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.integers(0, 10**6))
def test_any_size_and_limit_is_respected(w: int, h: int, limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (1 + h // 9, 1 + w // 9, 3), np.uint8))
    check(coarse.resize((w, h), Image.Resampling.NEAREST), Segments(max_fragments=limit, side=64))


def test_the_same_picture_gives_the_same_fragments() -> None:
    picture = draw(make_scene((0, 0, 11, 0)))
    one, other = Segments().extract(picture), Segments().extract(picture.copy())
    assert one.features.tobytes() == other.features.tobytes()


def test_the_whole_picture_comes_first() -> None:
    result = Segments().extract(draw(make_scene((0, 0, 4, 0))))
    assert result.boxes is not None
    assert result.boxes[0].tolist() == [0, 0, 1, 1]


def test_most_drawn_things_are_found() -> None:
    hits = []
    for family in range(25):
        scene = make_scene((3, 0, family, 0))
        result = Segments().extract(draw(scene)).boxes
        assert result is not None
        for obj in scene.objects:
            for thing in obj.boxes:
                # Things that touch are found as one.
                best = max(_iou(np.array(b) / 224, box) for b in (thing, obj.box) for box in result)
                hits.append(best > 0.5)
    assert np.mean(hits) > 0.85


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def test_a_mirror_image_differs_in_place_more_than_in_look() -> None:
    picture = draw(make_scene((0, 0, 11, 0)))
    one = Segments().extract(picture).features[0]
    other = Segments().extract(ImageOps.mirror(picture)).features[0]
    assert np.abs(one - other).mean() < 0.05


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 10**6))
def test_components_agree_with_a_flood_fill(height: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((height, width)) < 0.6
    labels = mask_components(mask)
    expected = _flood(mask)
    assert (labels >= 0).tolist() == mask.tolist()
    pairs = set(zip(labels[mask].tolist(), expected[mask].tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def _flood(mask: np.ndarray) -> np.ndarray:
    labels = np.full(mask.shape, -1)
    for start in zip(*np.nonzero(mask), strict=True):
        if labels[start] >= 0:
            continue
        stack, number = [start], labels.max() + 1
        while stack:
            y, x = stack.pop()
            inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1]
            if inside and mask[y, x] and labels[y, x] < 0:
                labels[y, x] = number
                stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return labels


def test_a_snake_is_one_component() -> None:
    mask = np.ones((9, 9), dtype=bool)
    mask[1::4, :-1] = False
    mask[3::4, 1:] = False
    assert mask_components(mask).max() == 0
    assert connected(np.zeros((3, 2), bool), np.zeros((2, 3), bool)).max() == 8


def test_options_are_checked_and_change_the_fingerprint() -> None:
    assert "segments" in extractors
    with pytest.raises(ConfigError, match="did you mean 'side'"):
        extractors.create("segments", {"sid": 3})
    with pytest.raises(ConfigError, match="at least 1"):
        Segments(max_fragments=0)
    assert Segments(side=96).fingerprint() != Segments().fingerprint()
