"""Features made in parts are those of one process, byte for byte; a wrong part is named."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from counterfoil.core.errors import BusyError, ConfigError, DataError
from counterfoil.core.parts import MANIFEST, Part, part_of_item, parts_folder
from counterfoil.core.storage.locks import LOCK
from counterfoil.data import load_pairs
from counterfoil.features.build import build_features
from counterfoil.features.parts import extract_part
from tests.features.tiny_networks import photos, save_network
from tests.holding import content, held

OPTIONS = {"side": 32, "max_fragments": 4}
IMAGES = 23


@pytest.fixture
def pairs(tmp_path: Path):
    """Photos in three splits: two cannot be decoded, and two are copies of each other."""
    folder = tmp_path / "photos"
    photos(folder, IMAGES)
    (folder / "4.png").write_bytes(b"no image")
    (folder / "15.png").write_bytes((folder / "16.png").read_bytes()[:60])
    shutil.copy(folder / "0.png", folder / "20.png")
    with (folder / "captions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for number in range(IMAGES):
            split = "train" if number < 13 else "dev" if number < 18 else "test"
            writer.writerow([f"{number}.png", f"a picture, number {number}", split])
    return load_pairs(folder / "captions.csv")


def one_process(pairs, folder: Path, **options) -> dict[str, bytes]:
    build_features(pairs, folder, "segments", OPTIONS, cache_dir=None, workers=1, **options)
    return content(folder)


def make(pairs, folder: Path, text: str, **options):
    return extract_part(pairs, folder, Part.parse(text), "segments", OPTIONS, workers=1, **options)


def merge(pairs, folder: Path, **options) -> dict[str, bytes]:
    return one_process(pairs, folder, merge=True, **options)


@pytest.mark.parametrize(("total", "layout"), [(1, "scan"), (3, "shards"), (40, "jsonl")])
def test_merged_parts_are_byte_for_byte_the_result_of_one_process(
    pairs, tmp_path, total: int, layout: str
) -> None:
    for number in reversed(range(total)):
        make(pairs, tmp_path / "parts", f"{number + 1}/{total}")
    merged = merge(pairs, tmp_path / "parts", format=layout)
    assert merged == one_process(pairs, tmp_path / "whole", format=layout)
    failed = json.loads(merged["features.json"])["failed"]
    assert [one["where"] for one in failed] == ["train/4", "dev/15"]


@pytest.mark.slow  # transformers takes long to import
def test_a_network_gives_the_same_bytes_in_parts(pairs, tmp_path) -> None:
    options = {"model": str(save_network(tmp_path / "vit", "vit"))}
    for number in (1, 2, 3):
        extract_part(pairs, tmp_path / "parts", Part(number, 3), "transformers", options)
    for folder, merged in (("parts", True), ("whole", False)):
        build_features(
            pairs, tmp_path / folder, "transformers", options, cache_dir=None, merge=merged
        )
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_the_shares_of_all_parts_are_all_items_once() -> None:
    for count in (0, 1, 7, 100):
        for total in (1, 2, 3, 9):
            parts = [Part(number + 1, total) for number in range(total)]
            assert [item for part in parts for item in part.share(count)] == list(range(count))
            for part in parts:
                assert all(part_of_item(item, count, total) == part for item in part.share(count))


def test_an_interrupted_part_continues_where_it_stopped(pairs, tmp_path, monkeypatch) -> None:
    from counterfoil.features import extract

    monkeypatch.setattr(extract, "_CHUNK", 2)

    class Interrupted(Exception):
        pass

    class StopsAfterFour(extract.Silent):
        def track(self, items, label="", total=None, done=0):
            for number, item in enumerate(items):
                if "extracting" in label and number == 4:
                    raise Interrupted
                yield item

    with pytest.raises(Interrupted):
        make(pairs, tmp_path / "out", "1/2", progress=StopsAfterFour())
    with pytest.raises(DataError, match="part 2 of 2 missing"):
        merge(pairs, tmp_path / "out")
    make(pairs, tmp_path / "out", "2/2")
    with pytest.raises(DataError, match=r"part 1 of 2 is not complete.*--part 1/2"):
        merge(pairs, tmp_path / "out")
    report = make(pairs, tmp_path / "out", "1/2")
    assert (report.images, report.use.cached, report.use.extracted) == (11, 4, 6)
    assert merge(pairs, tmp_path / "out") == one_process(pairs, tmp_path / "whole")


def test_a_missing_or_mismatched_part_is_named(pairs, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"out\.parts: no parts to merge"):
        merge(pairs, out)
    make(pairs, out, "1/2")
    extract_part(pairs, out, Part(2, 2), "segments", {**OPTIONS, "max_fragments": 5}, workers=1)
    with pytest.raises(DataError, match="part-2-of-2: part 2 of 2 was made with another extractor"):
        merge(pairs, out)
    with pytest.raises(DataError, match="part 2 of 2 was made with another extractor"):
        make(pairs, out, "2/2")
    make(pairs, out, "2/2", overwrite=True)
    smaller = load_pairs("scenes", options={"images": [4, 2, 2]}, cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="part 1 of 2 was made with another data set"):
        merge(smaller, out)
    make(pairs, out, "1/3")
    with pytest.raises(DataError, match="parts of 2 and of 3; delete"):
        merge(pairs, out)
    shutil.rmtree(parts_folder(out) / "part-1-of-3")
    (parts_folder(out) / "part-1-of-2" / MANIFEST).write_text('{"kind": ["features"]}')
    with pytest.raises(DataError, match=r"part-1-of-2/part\.json: damaged"):
        merge(pairs, out)
    assert not out.exists()


def test_an_image_that_changed_since_its_part_is_named(pairs, tmp_path) -> None:
    make(pairs, tmp_path / "out", "1/2")
    make(pairs, tmp_path / "out", "2/2")
    ref = pairs.test.pixels[1]
    ref.path.write_bytes(pairs.test.pixels[0].read())
    merge(pairs, tmp_path / "out", overwrite=True)  # a copy of another image has features
    photos(tmp_path / "other", 40)
    ref.path.write_bytes((tmp_path / "other" / "39.png").read_bytes())
    with pytest.raises(DataError, match=r"part 2 of 2 has no features of image '19'"):
        merge(pairs, tmp_path / "out", overwrite=True)


def test_two_writers_of_one_part_are_refused(pairs, tmp_path) -> None:
    folder = Part(1, 2).folder(tmp_path / "out")
    folder.mkdir(parents=True)
    with (
        held(folder / LOCK),
        pytest.raises(BusyError, match="another process is making part 1 of 2"),
    ):
        make(pairs, tmp_path / "out", "1/2")
    assert make(pairs, tmp_path / "out", "1/2").images == 11


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "-1/2", "a/b", "1/9999999", "¹/2"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--part"):
        Part.parse(text)


def test_the_environment_of_torchrun_selects_the_part() -> None:
    assert Part.parse("auto", {"RANK": "2", "WORLD_SIZE": "4"}) == Part(3, 4)
    with pytest.raises(ConfigError, match="start it with torchrun"):
        Part.parse("auto", {})
    with pytest.raises(ConfigError, match="no numbers"):
        Part.parse("auto", {"RANK": "x", "WORLD_SIZE": "4"})


@pytest.mark.slow
def test_processes_of_torchrun_make_the_parts_and_the_first_merges(pairs, tmp_path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "counterfoil", "features", str(tmp_path / "photos" / "captions.csv")]
    words += ["--out", str(tmp_path / "out"), "-b", "segments", "--no-cache", "--part", "auto"]
    words += ["--backbone-option", "side=32", "--backbone-option", "max_fragments=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "out") == one_process(pairs, tmp_path / "whole")
    assert sorted(path.name for path in parts_folder(tmp_path / "out").iterdir()) == [
        "part-1-of-2",
        "part-2-of-2",
    ]
