"""Features are cached by the content of an image, whatever data set it is in."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from counterfoil.data.images import FileImage
from counterfoil.data.pairs import Pairs, Split
from counterfoil.features import cache as cache_module
from counterfoil.features import extract, extractors, with_fragments
from counterfoil.features.cache import FOLDER, cache_bytes, cache_contents, clear_cache
from counterfoil.features.extract import Job, extract_pairs
from tests.features.test_extract import OPTIONS, Recorder, arrays
from tests.features.tiny_networks import photos, picture


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "_CHUNK", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    photos(tmp_path / "photos", 12, side=16)
    return tmp_path / "photos"


def data_set(folder: Path, **splits: Sequence[object]) -> Pairs:
    """A data set of photos of a folder, by split."""
    made = {}
    for name, keys in splits.items():
        refs = [FileImage(folder / f"{key}.png") for key in keys]
        captions = [[f"caption {key}"] for key in keys]
        made[name] = Split(name, list(map(str, keys)), captions, pixels=refs)
    return Pairs("mine", made)


def extracted(pairs: Pairs, cache: Path | None, recorder: Recorder | None = None) -> Pairs:
    return with_fragments(pairs, cache, "segments", OPTIONS, recorder, workers=1)


def row_files(cache: Path) -> list[Path]:
    return sorted(cache.glob(f"{FOLDER}/segments-*/*.rows"))


def test_another_split_order_or_subset_of_the_same_photos_extracts_nothing_again(
    folder: Path, tmp_path: Path
) -> None:
    first = Recorder()
    extracted(data_set(folder, train=range(8), test=range(8, 12)), tmp_path / "cache", first)
    assert first.said == ["features: 0 of 12 images from the cache"]
    for splits in (
        {"train": range(4, 12), "dev": [0], "test": [3, 1]},
        {"everything": [11, 2, 7]},
        {"train": range(12)},
    ):
        again = Recorder()
        pairs = data_set(folder, **splits)
        made = extracted(pairs, tmp_path / "cache", again)
        count = sum(map(len, pairs))
        assert again.said == [f"features: {count} of {count} images from the cache"]
        assert again.seen == 0
        assert arrays(made) == arrays(extracted(pairs, None))


def test_only_new_photos_are_extracted(folder: Path, tmp_path: Path) -> None:
    extracted(data_set(folder, train=range(5)), tmp_path / "cache")
    recorder, pairs = Recorder(), data_set(folder, train=[9, 1, 10, 2], test=[11])
    made = extracted(pairs, tmp_path / "cache", recorder)
    assert recorder.said == ["features: 2 of 5 images from the cache"]
    assert recorder.seen == 3
    assert arrays(made) == arrays(extracted(pairs, None))


def test_a_photo_under_two_names_or_in_two_splits_is_extracted_once(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "3.png", folder / "copy.png")
    recorder = Recorder()
    made = extracted(data_set(folder, train=[1, 3, "copy"], test=[3]), tmp_path / "c", recorder)
    assert recorder.seen == 2
    assert made["train"].fragments is not None
    assert made["test"].fragments is not None
    one = made["train"].fragments.read(1).features
    np.testing.assert_array_equal(made["train"].fragments.read(2).features, one)
    np.testing.assert_array_equal(made["test"].fragments.read(0).features, one)


def test_a_photo_that_was_moved_or_renamed_is_still_cached(folder: Path, tmp_path: Path) -> None:
    before = extracted(data_set(folder, train=range(3)), tmp_path / "cache")
    shutil.move(folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "1.png").rename(tmp_path / "elsewhere" / "one.png")
    recorder, pairs = Recorder(), data_set(tmp_path / "elsewhere", train=[0, "one", 2])
    assert arrays(extracted(pairs, tmp_path / "cache", recorder)) == arrays(before)
    assert recorder.seen == 0


def test_a_photo_whose_content_changed_is_extracted_again_even_with_its_old_date(
    folder: Path, tmp_path: Path
) -> None:
    pairs = data_set(folder, train=range(12))
    extracted(pairs, tmp_path / "cache")
    path = folder / "5.png"
    status = path.stat()
    data = picture(99, 16, 16).tobytes()
    Image.frombytes("RGB", (16, 16), data).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    recorder = Recorder()
    made = extracted(pairs, tmp_path / "cache", recorder)
    assert recorder.said == ["features: 11 of 12 images from the cache"]
    assert arrays(made) == arrays(extracted(pairs, None))


def _flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def _truncate(data: bytearray) -> None:
    del data[-1]


def _empty(data: bytearray) -> None:
    data.clear()


def _flip_length(data: bytearray) -> None:
    data[24 + 32] ^= 1  # after the header and the first digest


def _flip_count(data: bytearray) -> None:
    data[14] ^= 1


@pytest.mark.parametrize("damage", [_flip, _truncate, _empty, _flip_length, _flip_count])
def test_a_damaged_file_of_the_cache_is_noticed_and_its_images_extracted_again(
    folder: Path, tmp_path: Path, damage: Any
) -> None:
    pairs = data_set(folder, train=range(8), test=range(8, 12))
    whole = arrays(extracted(pairs, tmp_path / "cache"))
    path = row_files(tmp_path / "cache")[1]
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    recorder = Recorder()
    assert arrays(extracted(pairs, tmp_path / "cache", recorder)) == whole
    assert recorder.seen == 4
    assert "1 damaged file(s)" in recorder.said[0]
    assert recorder.said[1] == "features: 8 of 12 images from the cache"
    healed = Recorder()
    assert arrays(extracted(pairs, tmp_path / "cache", healed)) == whole
    assert healed.said == ["features: 12 of 12 images from the cache"]


def test_damaged_digests_of_the_images_are_made_again(folder: Path, tmp_path: Path) -> None:
    pairs = data_set(folder, train=range(12))
    whole = arrays(extracted(pairs, tmp_path / "cache"))
    (path,) = (tmp_path / "cache").glob(f"{FOLDER}/digests/*")
    data = bytearray(path.read_bytes())
    _flip(data)
    path.write_bytes(data)
    recorder = Recorder()
    assert arrays(extracted(pairs, tmp_path / "cache", recorder)) == whole
    assert recorder.seen == 0


def test_extraction_goes_on_without_the_cache_if_the_disk_is_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, write, written = tmp_path / "cache", cache_module.write_atomically, []

    def write_until_full(path: Path, data: bytes) -> None:
        if cache in path.parents and path.suffix == ".rows":
            written.append(path)
            if len(written) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(cache_module, "write_atomically", write_until_full)
    recorder, pairs = Recorder(), data_set(folder, train=range(12))
    made = extracted(pairs, cache, recorder)
    assert [line for line in recorder.said if "the disk is full" in line] == [recorder.said[1]]
    assert len(row_files(cache)) == 1
    assert arrays(made) == arrays(extracted(pairs, None))


def test_extraction_goes_on_without_a_cache_that_cannot_be_written(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    recorder, pairs = Recorder(), data_set(folder, train=range(6))
    made = extracted(pairs, tmp_path / "file" / "cache", recorder)
    assert "cannot be written" in recorder.said[1]
    assert arrays(made) == arrays(extracted(pairs, None))


def test_two_writers_at_once_give_both_the_same_features(folder: Path, tmp_path: Path) -> None:
    sets = [data_set(folder, train=range(9)), data_set(folder, test=range(11, 2, -1))] * 2
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda pairs: extracted(pairs, tmp_path / "cache"), sets))
    for pairs, result in zip(sets, made, strict=True):
        assert arrays(result) == arrays(extracted(pairs, None))
    recorder = Recorder()
    extracted(data_set(folder, train=range(12)), tmp_path / "cache", recorder)
    assert recorder.seen == 0


def test_a_photo_that_changes_during_extraction_does_not_enter_the_cache(
    folder: Path, tmp_path: Path
) -> None:
    class Changes(Recorder):
        def say(self, text: str) -> None:  # after digests were made, before extraction
            picture(77, 16, 16).save(folder / "2.png")

    pairs = data_set(folder, train=range(3))
    made = extracted(pairs, tmp_path / "cache", Changes())
    assert [problem.where for problem in made.problems] == ["train/2"]
    assert "was changed" in made.problems[0].message
    assert sum(one.images for one in cache_contents(tmp_path / "cache")) == 2


def test_the_cache_says_its_size_and_clearing_deletes_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "scenes").mkdir(parents=True)
    (cache / "scenes" / "mine").write_text("stays")
    extracted(data_set(folder, train=range(5)), cache)
    (contents,) = cache_contents(cache)
    assert contents.images == 5
    files = [path for path in (cache / FOLDER).rglob("*") if path.is_file()]
    assert cache_bytes(cache) == sum(path.stat().st_size for path in files)
    assert clear_cache(cache) > 0
    assert sorted(path.name for path in cache.rglob("*")) == ["mine", "scenes"]
    assert clear_cache(cache) == cache_bytes(cache) == 0


@pytest.mark.slow
def test_features_of_a_network_do_not_depend_on_the_images_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from counterfoil.features.efficientnet_network import EfficientNetLite

    monkeypatch.setattr(extract, "_CHUNK", 16)
    photos(tmp_path, 16)
    torch.manual_seed(0)
    network = EfficientNetLite(0).eval()
    for part in network.modules():
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(part.weight)

    def made(keys: Sequence[int]) -> list[bytes]:
        tool = extractors.create("efficientnet-lite", {"size": 64})
        tool.__dict__["_network"] = network
        tool.fingerprint = lambda: "random weights"
        job = Job("efficientnet-lite", {}, tool, Recorder(), 1, "cpu")
        table = extract_pairs(data_set(tmp_path, train=keys), None, job).pairs["train"].fragments
        assert table is not None
        return [table.features.row(row).tobytes() for row in range(len(keys))]

    all_of_them = made(range(16))
    assert len(set(all_of_them)) == 16
    assert made([7]) == [all_of_them[7]]
    assert made([11, 3, 7, 2, 9]) == [all_of_them[key] for key in (11, 3, 7, 2, 9)]


def test_a_cache_of_one_data_set_serves_a_data_set_of_another_name(
    folder: Path, tmp_path: Path
) -> None:
    extracted(data_set(folder, train=range(4)), tmp_path / "cache")
    recorder = Recorder()
    extracted(replace(data_set(folder, a=range(4)), name="other"), tmp_path / "cache", recorder)
    assert recorder.seen == 0


def test_a_file_that_a_drive_cannot_read_now_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = data_set(folder, train=range(8))
    extracted(pairs, tmp_path / "cache")
    files = row_files(tmp_path / "cache")

    def fail(*args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    cache = cache_module.FeatureCache(files[0].parent)
    assert cache.find({b"0" * 32}) == {}
    assert cache.damaged == []
    assert row_files(tmp_path / "cache") == files
