"""What two splits share: ids, captions word for word, images that look alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from counterfoil.data import inspect
from counterfoil.data.duplicates import MAX_HASH_BITS, Looks, _count_bits, find_look_alikes, look_at
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.splits import leakage_warning, shared_by, shared_with_train


def photo(seed: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """Soft blobs of color, as different from each other as photos are."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 255, (9, 12, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(2))


def write_set(folder: Path, rows: list[tuple[str, str, str]]) -> Path:
    lines = [json.dumps({"image": f, "split": s, "captions": [c]}) for f, s, c in rows]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def notes(folder: Path, kind: str, **options: object) -> list[str]:
    return [str(p) for p in inspect(folder, **options).problems if p.kind == kind]


def test_captions_that_stand_word_for_word_in_two_splits_are_counted(tmp_path) -> None:
    for number in range(5):
        photo(number).save(tmp_path / f"{number}.png")
    rows = [
        ("0.png", "train", "A dog runs."),
        ("1.png", "train", "Two cats sleep on a sofa"),
        ("2.png", "test", "a  dog runs"),
        ("3.png", "test", "two cats sleep on the sofa"),
        ("4.png", "dev", "A DOG runs!"),
    ]
    result = inspect(write_set(tmp_path, rows))
    shared = {entry.splits: entry.captions for entry in result.leakage}
    assert shared == {("train", "dev"): 1, ("train", "test"): 1, ("dev", "test"): 1}
    assert len(notes(tmp_path, "shared-captions")) == 3
    assert result.usable
    assert json.loads(json.dumps(result.as_dict()))["leakage"][0]["captions"] == 1


def test_a_photo_scaled_and_encoded_again_under_another_name_is_found(tmp_path) -> None:
    for number in range(8):
        photo(number).save(tmp_path / f"{number}.png")
    photo(3).resize((200, 150)).save(tmp_path / "copy.jpg", quality=60)
    photo(5).save(tmp_path / "again.webp", quality=50)
    rows = [(f"{n}.png", "train", f"caption {n}") for n in range(6)]
    rows += [(f"{n}.png", "test", f"caption {n}") for n in (6, 7)]
    rows += [("copy.jpg", "test", "x"), ("again.webp", "test", "y")]
    result = inspect(write_set(tmp_path, rows))
    assert [entry.images for entry in result.leakage] == [2]
    (note,) = notes(tmp_path, "similar-images")
    assert "2 images of 'test' look like one of 'train'" in note
    assert "'copy' like '3'" in note
    assert inspect(tmp_path, deep=False).leakage[0].images is None


def test_images_without_structure_that_differ_in_color_do_not_look_alike(tmp_path) -> None:
    colors = ["red", "green", "blue", "white", "black", "orange"]
    for color in colors:
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{color}.png")
    rows = [(f"{c}.png", "train" if n < 3 else "test", c) for n, c in enumerate(colors)]
    assert notes(write_set(tmp_path, rows), "similar-images") == []


def test_an_image_with_one_id_in_two_splits_is_counted_by_its_id_alone(tmp_path) -> None:
    photo(0).save(tmp_path / "0.png")
    result = inspect(write_set(tmp_path, [("0.png", "train", "a"), ("0.png", "test", "b")]))
    (shared,) = result.leakage
    assert (shared.ids, shared.images) == (1, 0)


def test_bits_are_counted() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, 500, dtype=np.uint64)
    values[:2] = 0, 2**64 - 1
    assert _count_bits(values).tolist() == [bin(value).count("1") for value in values.tolist()]


def looks(hashes: np.ndarray) -> Looks:
    thumbnails = np.zeros((len(hashes), 192), np.int16)
    return Looks(np.arange(len(hashes)), hashes.astype(np.uint64), thumbnails)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_comparing_all_hashes_finds(seed) -> None:
    rng = np.random.default_rng(seed)
    one = rng.integers(0, 2**64, 300, dtype=np.uint64)
    other = rng.integers(0, 2**64, 100, dtype=np.uint64)
    for row in range(60):  # zero to five signs apart
        flipped = sum(1 << int(bit) for bit in rng.choice(64, row % 6, replace=False))
        other[row] = one[row] ^ np.uint64(flipped)
    expected = {
        (a, b)
        for a in range(300)
        for b in range(100)
        if bin(int(one[a] ^ other[b])).count("1") <= MAX_HASH_BITS
    }
    result = find_look_alikes(looks(one), looks(other))
    assert result.complete
    assert set(result.pairs) == expected


def test_thousands_of_flat_images_do_not_take_the_search_forever(monkeypatch) -> None:
    module = sys.modules["counterfoil.data.duplicates"]
    counted = []
    count_bits = module._count_bits
    monkeypatch.setattr(module, "_count_bits", lambda v: counted.append(len(v)) or count_bits(v))
    monkeypatch.setattr(module, "MAX_COMPARISONS", 10**6)
    one, other = looks(np.zeros(20_000)), looks(np.zeros(3_000))
    one.thumbnails[:, ::2], other.thumbnails[:, 1::2] = 200, 200  # as bright, and yet others
    result = find_look_alikes(one, other)
    assert result.pairs == []
    assert not result.complete
    assert sum(counted) <= 10**6 + 20_000


def test_equal_images_have_equal_looks_at_any_size() -> None:
    first, second = look_at(photo(1)), look_at(photo(1, (640, 480)))
    assert bin(first.hash ^ second.hash).count("1") <= MAX_HASH_BITS


def test_ids_shared_with_the_training_split_are_counted_by_split() -> None:
    def split(name: str, *ids: str) -> Split:
        return Split(name, ids, [["x"] for _ in ids])

    pairs = Pairs("p", {"train": split("train", "a", "b"), "val": split("val", "b", "c"),
                        "test": split("test", "d")})  # fmt: skip
    assert shared_with_train(pairs, "dev", "test", "train", "nosuch") == {"dev": 1}
    line = leakage_warning({"dev": 1, "test": 7})
    assert line.startswith("warning: 1 image id of 'dev', 7 image ids of 'test' are also in")
    assert "1 image id of 'dev' is also in" in leakage_warning({"dev": 1})
    assert "\n" not in line
    assert leakage_warning({}) == ""
    assert shared_with_train(Pairs("p", {"test": split("test", "d")}), "test") == {}


@pytest.mark.parametrize(
    "names", [("train", "train_noisy"), ("dev", "dev_unseen"), ("test", "tests")]
)
def test_splits_whose_names_begin_alike_are_compared(names, tmp_path) -> None:
    one, other = names
    for number in range(3):
        photo(number).save(tmp_path / f"{number}.png")
    rows = [
        ("0.png", one, "a dog"),
        ("1.png", one, "b"),
        ("1.png", other, "c"),
        ("2.png", other, "a dog"),
    ]
    result = inspect(write_set(tmp_path, rows))
    assert {(e.ids, e.captions) for e in result.leakage} == {(1, 1)}
    assert len(notes(tmp_path, "shared-ids")) == 1
    messages = [problem.message for problem in result.problems]
    assert any(message.startswith("1 id is in both") for message in messages)
    assert any(message.startswith("1 caption of") for message in messages)


def test_the_thousand_images_of_coco_are_part_of_all_five_thousand(tmp_path) -> None:
    photo(0).save(tmp_path / "0.png")
    rows = [("0.png", "test", "a dog"), ("0.png", "testall", "a dog")]
    result = inspect(write_set(tmp_path, rows))
    assert result.leakage == []
    assert notes(tmp_path, "shared-ids") == []


def test_images_that_both_select_and_test_a_checkpoint_are_warned_of() -> None:
    splits = {
        name: Split(name, ids, [["x"] for _ in ids])
        for name, ids in (("train", "ab"), ("dev", "cde"), ("test", "def"), ("testall", "defg"))
    }
    pairs = Pairs("p", splits)
    assert shared_by(pairs, "dev", "test") == shared_by(pairs, "val", "testall") == 2
    assert shared_by(pairs, "test", "testall") == shared_by(pairs, "dev", "val") == 0
    assert shared_by(pairs, "dev", "nosuch") == shared_by(pairs, "train", "test") == 0
    line = leakage_warning({}, ("dev", "test", 2))
    assert line.startswith("warning: 2 image ids are in both 'dev' and 'test'")
    assert "\n" not in leakage_warning({"dev": 1}, ("dev", "test", 2))
    assert leakage_warning({}, ("dev", "test", 0)) == ""


def test_a_search_that_leaves_candidates_out_is_not_complete() -> None:
    module = sys.modules["counterfoil.data.duplicates"]
    many = module._THUMBNAILS
    one, other = looks(np.zeros(many + 1)), looks(np.zeros(1))
    one.thumbnails[:many, ::2], other.thumbnails[:, 1::2] = 200, 200  # as bright, and yet others
    one.thumbnails[many] = other.thumbnails[0]
    result = find_look_alikes(one, other)
    assert (result.pairs, result.complete) == ([], False)
    all_alike = looks(np.zeros(many + 1))
    assert find_look_alikes(all_alike, looks(np.zeros(1))).complete
