"""Pixels as fragments: what a network that learns from pictures is shown of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.data.batches.collate import Collate, pad_fragments
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.convert import convert
from counterfoil.data.fragments import PixelAugmentation, PixelTable
from counterfoil.data.load import load_pairs
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.features import Pixels, extractors, with_fragments
from counterfoil.features.pixels import random_part, to_patches
from tests.features.tiny_networks import picture
from tests.models.duals import photo_pairs, save_dual


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory):
    return photo_pairs(tmp_path_factory.mktemp("photos"))


def pixels(**options):
    return Pixels(**{"size": 16, "patch": 8, **options})


def whole_of(features: np.ndarray, patch: int) -> np.ndarray:
    """The picture that patches were cut from, put together one by one."""
    count = int(len(features) ** 0.5)
    out = np.zeros((count * patch, count * patch, 3), np.uint8)
    for place, row in enumerate(features):
        y, x = divmod(place, count)
        out[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] = row.reshape(patch, patch, 3)
    return out


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_patches_put_together_are_the_picture(patch: int, count: int, rest: int) -> None:
    side = patch * count + min(rest, patch - 1)
    image = np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)
    assert np.array_equal(
        whole_of(to_patches(image, patch), patch), image[: patch * count, : patch * count]
    )


def test_each_patch_has_the_box_it_was_cut_from() -> None:
    tool = pixels(fit="squash")
    result = tool.extract(picture(3))
    assert result.features.dtype == np.uint8
    assert result.features.shape == (tool.max_fragments, tool.dim) == (4, 192)
    shown = np.asarray(picture(3).resize((16, 16), Image.Resampling.BICUBIC))
    for row, (x1, y1, x2, y2) in zip(result.features, (result.boxes * 16).astype(int), strict=True):
        assert np.array_equal(row.reshape(8, 8, 3), shown[y1:y2, x1:x2])


def test_a_crop_has_boxes_within_the_whole_picture() -> None:
    result = pixels(fit="crop").extract(picture(1, 64, 32))
    assert result.boxes[:, [0, 2]].min() == pytest.approx(0.25)
    assert result.boxes[:, [0, 2]].max() == pytest.approx(0.75)
    assert (result.boxes[:, 1].min(), result.boxes[:, 3].max()) == (0.0, 1.0)


def test_what_is_left_over_beside_the_last_patch_is_in_no_box() -> None:
    result = pixels(size=19).extract(picture(1))
    assert len(result) == 4
    assert result.boxes.max() == pytest.approx(16 / 19)


def test_a_mirrored_picture_has_the_boxes_of_what_it_shows() -> None:
    tool, image = pixels(fit="squash"), picture(5)
    plain = {tuple(b): f for f, b in zip(*vars(tool.extract(image)).values(), strict=True)}
    for seed in range(8):
        result = tool.augment(image, PixelAugmentation(flip=True), np.random.default_rng(seed))
        first = result.features[0].reshape(8, 8, 3)
        mirrored = result.boxes[0][0] > 0
        kept = plain[tuple(result.boxes[0])].reshape(8, 8, 3)
        assert np.array_equal(first, kept[:, ::-1] if mirrored else kept)
    assert {
        bool(
            tool.augment(image, PixelAugmentation(flip=True), np.random.default_rng(s)).boxes[0][0]
        )
        for s in range(8)
    } == {True, False}


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.05, 1.0), st.integers(0, 1000))
def test_a_random_part_is_within_the_picture_and_large_enough(width, height, least, seed) -> None:
    x1, y1, x2, y2 = random_part((width, height), least, np.random.default_rng(seed))
    assert 0 <= x1 < x2 <= 1 + 1e-9
    assert 0 <= y1 < y2 <= 1 + 1e-9
    assert (x2 - x1) * (y2 - y1) >= least - 1e-9
    if (x1, y1, x2, y2) != (0, 0, 1, 1):
        assert 3 / 4 - 1e-9 <= (x2 - x1) * width / ((y2 - y1) * height) <= 4 / 3 + 1e-9


def test_what_a_model_states_is_kept_in_a_name_that_needs_no_model(tmp_path: Path) -> None:
    folder = save_dual(tmp_path / "clip", "clip", size={"shortest_edge": 20}, resample=2)
    tool = Pixels(model=str(folder))
    assert (tool.side, tool.patch, tool.preprocessing.fit) == (16, 8, "crop")
    again = extractors.create(tool.description(), {})
    assert str(folder) not in tool.description()
    image = picture(2, 50, 40)
    assert np.array_equal(again.extract(image).features, tool.extract(image).features)
    assert np.array_equal(again.extract(image).boxes, tool.extract(image).boxes)


def test_a_siglip_is_shown_the_whole_picture_unless_told_otherwise(tmp_path: Path) -> None:
    folder = save_dual(tmp_path / "siglip", "siglip")
    assert Pixels(model=str(folder)).preprocessing.fit == "squash"
    assert extractors.create(f"pixels:{folder}", {"fit": "crop"}).preprocessing.fit == "crop"
    (folder / "preprocessor_config.json").unlink()
    assert Pixels(model=str(folder)).preprocessing.fit == "squash"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name a model"),
        ({"size": 8, "patch": 9}, "patch 9, size 8"),
        ({"model": "/nowhere/clip"}, "no dual encoder could be loaded.*path of a local folder"),
    ],
)
def test_pixels_that_cannot_be_are_refused(options, message) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        Pixels(**options)


def test_another_kind_of_network_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(CheckpointError, match="'vit', not a dual encoder"):
        Pixels(model=str(tmp_path))


def test_a_data_set_is_read_image_by_image(photos, tmp_path: Path) -> None:
    seen = with_fragments(photos, tmp_path, "pixels", {"size": 16, "patch": 8})
    assert not any(tmp_path.iterdir())  # nothing is extracted
    table = seen.test.fragments
    assert isinstance(table, PixelTable)
    assert (len(table), table.max_fragments, table.dim) == (8, 4, 192)
    some = seen.test.select([5, 2])
    assert np.array_equal(some.fragments.read(1).features, table.read(2).features)
    assert np.array_equal(table.stored(2).features, table.read(2).features)


def test_pixels_replace_features_that_came_with_the_images(photos, tmp_path: Path) -> None:
    old = with_fragments(photos, tmp_path, "segments")
    assert (
        with_fragments(old, tmp_path, "pixels", {"size": 16, "patch": 8}).test.fragments.dim == 192
    )


def test_a_data_set_without_images_is_refused(concepts, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no images, only features"):
        with_fragments(concepts, tmp_path, "pixels", {"size": 16, "patch": 8})


def test_shards_are_read_as_files_are(photos, tmp_path: Path) -> None:
    convert(photos, tmp_path / "shards", "shards")
    options = {"size": 16, "patch": 8}
    from_files = with_fragments(photos, tmp_path, "pixels", options).test
    from_shards = with_fragments(load_pairs(tmp_path / "shards"), tmp_path, "pixels", options).test
    place = {key: row for row, key in enumerate(from_shards.ids)}
    for row, key in enumerate(from_files.ids):
        result = from_shards.fragments.read(place[key]).features
        assert np.array_equal(result, from_files.fragments.read(row).features)


def items(split, **augmentation):
    text = WordText(Vocabulary.build(split.texts, 1))
    return CaptionItems(split, text, Augmentation(**augmentation), seed=3)


def test_a_batch_carries_bytes_and_arrives_as_numbers(photos, tmp_path: Path) -> None:
    split = with_fragments(photos, tmp_path, "pixels", {"size": 16, "patch": 8}).train
    made = items(split)
    batch = Collate(0)([made[0, caption, 0] for caption in (0, 2, 4)])
    assert str(batch.images.fragments.dtype) == "torch.uint8"
    assert batch.images.mask.all()
    arrived = batch.to("cpu").images.fragments
    assert str(arrived.dtype) == "torch.float32"
    assert np.array_equal(arrived[1].numpy(), split.fragments.read(1).features)


def test_augmentation_depends_on_epoch_caption_and_view_alone(photos, tmp_path: Path) -> None:
    split = with_fragments(photos, tmp_path, "pixels", {"size": 16, "patch": 8}).train
    pixel_augmentation = PixelAugmentation(crop=0.3, flip=True)
    one, other = (
        items(split, pixel_augmentation=pixel_augmentation),
        items(split, pixel_augmentation=pixel_augmentation),
    )
    indices = [(epoch, caption, view) for epoch in (0, 1) for caption in (0, 1) for view in (0, 1)]
    seen = [one[index].fragments for index in indices]
    for index, fragments in zip(reversed(indices), reversed(seen), strict=True):
        again = other[index].fragments
        assert np.array_equal(again.features, fragments.features)
        assert np.array_equal(again.boxes, fragments.boxes)
    assert len({fragments.features.tobytes() for fragments in seen}) == len(seen)


def test_an_image_that_cannot_be_read_is_skipped_by_name(photos, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    refs = [type(photos.train.pixels[0])(broken), *photos.train.pixels[1:]]
    pairs = with_fragments(photos, tmp_path, "pixels", {"size": 16, "patch": 8})
    split = pairs.train
    table = PixelTable.of(refs, pixels(), "pixels")
    made = items(type(split)(split.name, split.ids, split.captions, refs, table))
    assert "broken.png" in made[0, 0, 0]
    batch = Collate(0)([made[0, 0, 0], made[0, 2, 0]])
    assert len(batch.skipped) == 1
    assert batch.image_ids.tolist() == [1]


def test_what_cannot_be_done_to_pixels_or_features_is_refused(photos, concepts, tmp_path) -> None:
    split = with_fragments(photos, tmp_path, "pixels", {"size": 16, "patch": 8}).train
    with pytest.raises(ConfigError, match="drop_regions"):
        items(split, regions=0.2)
    with pytest.raises(ConfigError, match="random_crop"):
        items(concepts.train, pixel_augmentation=PixelAugmentation(crop=0.5))


def test_features_are_padded_as_ever(concepts) -> None:
    batch = pad_fragments([concepts.train.fragments.read(i) for i in range(4)])
    assert str(batch.fragments.dtype) == "torch.float32"
    assert batch.to("cpu").fragments is not None
