"""What a network is shown: sizes, the part of the picture, and boxes that lead back to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from counterfoil.features.extractors import map_cells, token_cells
from counterfoil.features.views import (
    boxes_in_image,
    center_crop,
    crop_boxes,
    find_grid,
    fit_within,
    grid_boxes,
    read_detection,
    read_preprocessing,
    squash,
)

BILINEAR, NEAREST = int(Image.Resampling.BILINEAR), int(Image.Resampling.NEAREST)
SIDES = st.integers(1, 60)


@given(st.integers(1, 9), st.integers(1, 9))
def test_cells_tile_the_picture_row_by_row(rows: int, columns: int) -> None:
    boxes = grid_boxes(rows, columns)
    expected = [
        (x / columns, y / rows, (x + 1) / columns, (y + 1) / rows)
        for y in range(rows)
        for x in range(columns)
    ]
    np.testing.assert_allclose(boxes, expected, atol=1e-6)


@given(SIDES, SIDES, st.integers(1, 20), st.integers(1, 20))
def test_any_picture_is_squashed_whole(w: int, h: int, height: int, width: int) -> None:
    view = squash(Image.new("RGB", (w, h), (9, 8, 7)), (height, width), BILINEAR)
    assert view.pixels.shape == (height, width, 3)
    assert (view.pixels == (9, 8, 7)).all()
    assert view.box == (0, 0, 1, 1)


def test_the_middle_of_a_wide_picture_is_what_is_cropped() -> None:
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 255
    view = center_crop(Image.fromarray(pixels), (8, 8), 8, NEAREST)
    assert (view.pixels == 255).all()
    np.testing.assert_allclose(view.box, (1 / 3, 0, 2 / 3, 1))
    np.testing.assert_allclose(
        boxes_in_image(grid_boxes(1, 2), view.box)[0], (1 / 3, 0, 0.5, 1), atol=1e-6
    )


@given(SIDES, SIDES, st.integers(0, 10))
def test_a_crop_is_inside_and_has_the_crops_proportions(w: int, h: int, more: int) -> None:
    view = center_crop(Image.new("RGB", (w, h)), (16, 16), 16 + more, BILINEAR)
    x1, y1, x2, y2 = view.box
    assert 0 <= x1 < x2 <= 1
    assert 0 <= y1 < y2 <= 1
    assert (x2 - x1) * w == pytest.approx((y2 - y1) * h)
    assert view.pixels.shape == (16, 16, 3)


@pytest.mark.parametrize("size", [(40_000, 2), (1, 9000), (1, 1)])
def test_extreme_proportions_cost_no_more_memory(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size)
    assert center_crop(image, (224, 224), 256, BILINEAR).pixels.shape == (224, 224, 3)
    height, width = fit_within(image, 80, 133, BILINEAR).pixels.shape[:2]
    assert max(height, width) <= 133
    assert min(height, width) >= 32


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3))
def test_crops_cover_the_picture_and_overlap_by_half(scales: list[float]) -> None:
    boxes = np.array(crop_boxes(scales))
    assert (boxes >= 0).all()
    assert (boxes <= 1).all()
    for scale in scales:
        own = boxes[np.isclose(boxes[:, 2] - boxes[:, 0], scale, atol=1e-6)]
        xs = np.unique(own[:, 0].round(9))
        assert xs[0] == 0
        assert own[:, 2].max() == pytest.approx(1)
        assert (np.diff(xs) <= scale / 2 + 1e-6).all()


@pytest.mark.parametrize(("special", "patch"), [(0, 8), (1, 8), (5, 8), (1, None), (0, None)])
def test_patches_are_told_from_the_tokens_before_them(special: int, patch: int | None) -> None:
    tokens = np.arange(2 * (16 + special) * 3, dtype=np.float32).reshape(2, 16 + special, 3)
    cells, boxes, pooled = token_cells(tokens, (32, 32), patch)
    np.testing.assert_array_equal(cells, tokens[:, special:])
    np.testing.assert_array_equal(boxes[1], grid_boxes(4, 4))
    np.testing.assert_allclose(pooled, tokens[:, 0] if special else tokens.mean(axis=1))


def test_patches_of_an_oblong_picture_and_merged_patches() -> None:
    tokens = np.zeros((1, 9, 2), np.float32)
    assert token_cells(tokens, (16, 32), 8)[1].tolist()[0] == grid_boxes(2, 4).tolist()
    assert token_cells(tokens[:, :4], (32, 32), 4)[1].tolist()[0] == grid_boxes(2, 2).tolist()


def test_cells_of_a_map_are_its_columns_of_channels() -> None:
    maps = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    cells, boxes, pooled = map_cells(maps)
    for row in range(3):
        for column in range(4):
            np.testing.assert_array_equal(cells[:, row * 4 + column], maps[:, :, row, column])
    assert boxes.shape == (2, 12, 4)
    np.testing.assert_allclose(pooled, maps.mean(axis=(2, 3)), atol=1e-6)


@pytest.mark.parametrize(
    ("stated", "natural", "size", "resized"),
    [
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}, 9, 224, 256),
        ({"size": {"height": 384, "width": 384}}, None, 384, 384),
        ({"size": 48}, None, 48, 48),
        ({}, 32, 32, 32),
        ({}, [32, 32], 32, 32),
        ({}, None, 224, 224),
    ],
)
def test_sizes_are_read_however_they_are_written(stated, natural, size, resized) -> None:
    wanted = read_preprocessing(stated, natural, "crop", None)
    assert wanted.size == (size, size)
    assert wanted.resized == resized


def test_normalization_is_read_in_units_of_pixels() -> None:
    wanted = read_preprocessing({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}, 8, "squash", 6)
    assert wanted.size == (6, 6)
    assert wanted.mean == (127.5,) * 3
    assert wanted.std == (63.75,) * 3
    plain = read_detection({"do_normalize": False, "size": {"height": 64, "width": 48}}, None)
    assert (plain.size, plain.fit, plain.mean, plain.std) == (
        (64, 48),
        "squash",
        (0,) * 3,
        (255,) * 3,
    )


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.randoms())
def test_a_grid_is_found_in_any_order_and_within_any_window(rows, columns, whole, random) -> None:
    x1, y1 = random.uniform(0, 0.3), random.uniform(0, 0.3)
    window = (x1, y1, random.uniform(0.7, 1), random.uniform(0.7, 1))
    boxes = boxes_in_image(grid_boxes(rows, columns), window)
    order = list(range(len(boxes)))
    random.shuffle(order)
    stored = boxes[order].astype(np.float16).astype(np.float32)  # as an index keeps them
    given = np.concatenate([[window], stored]).astype(np.float32) if whole else stored
    grid = find_grid(given)
    if rows * columns == 1:
        assert grid is None
        return
    assert grid is not None
    assert (grid.rows, grid.columns) == (rows, columns)
    assert grid.box == pytest.approx(window, abs=2e-3)
    assert given[list(grid.cells)] == pytest.approx(boxes, abs=2e-3)


def test_regions_and_overlapping_windows_are_no_grid() -> None:
    draw = np.random.default_rng(0).uniform(size=(9, 4)).astype(np.float32)
    regions = np.concatenate(
        [np.minimum(draw[:, :2], draw[:, 2:]), draw.max(1)[:, None] * [1, 1]], 1
    )
    for boxes in (regions, np.array(crop_boxes([0.5])), grid_boxes(3, 3)[:-1], np.zeros((0, 4))):
        assert find_grid(boxes.astype(np.float32)) is None
    assert find_grid(np.array([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0.5, 1]], np.float32)) is None
    assert find_grid(np.full((4, 4), np.nan, np.float32)) is None
