"""An index made in parts is that of one process, byte for byte; a wrong part is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import counterfoil as cf
from counterfoil.core.errors import BusyError, ConfigError, DataError
from counterfoil.core.parts import Part, parts_folder
from counterfoil.core.progress import Silent
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.storage.locks import LOCK
from counterfoil.data.fragments import FragmentTable
from counterfoil.search import SearchIndex, items, parts, update
from counterfoil.search.parts import MergedParts, PartSettings, encode_part
from tests.conftest import thinned
from tests.holding import content, held
from tests.search.conftest import NAMES, SMALL


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of ten images, commits of 30: the small data set has many of them."""
    for module in (items, update, parts):
        monkeypatch.setattr(module, "BLOCK_ITEMS", 10)
    for module in (update, parts):
        monkeypatch.setattr(module, "CAPTIONS_PER_BLOCK", 16)
    monkeypatch.setattr(update, "IMAGES_PER_COMMIT", 30)
    monkeypatch.setattr(parts, "BLOCKS_PER_COMMIT", 2)


@pytest.fixture
def splits(concepts, tmp_path):
    """Train and test; an image is unreadable, and a caption has no known word."""
    train = concepts.train
    table = train.fragments
    values = table.features.whole()
    values[47] = np.nan
    np.save(tmp_path / "features.npy", values)
    features = ArrayFile(tmp_path / "features.npy")
    captions = [list(texts) for texts in train.captions]
    captions[3][1] = "zzz qqq"
    changed = FragmentTable(features, table.rows, table.lengths, table.boxes)
    return [replace(train, fragments=changed, captions=captions), concepts.test]


def one_process(folder: Path, model, splits, **options) -> SearchIndex:
    index = SearchIndex.build(folder, model, fit_on=splits, **options)
    index.add(splits)
    return index


def merge(folder: Path, splits, settings: PartSettings, **options):
    merged = MergedParts.open(folder, splits, settings)
    index = SearchIndex.build(
        folder,
        settings.model,
        fit_on=splits,
        dtype=settings.dtype,
        retriever=settings.retriever,
        **options,
    )
    return index, merged.add_to(index)


@pytest.mark.parametrize(
    ("name", "dtype", "first_stage", "total"),
    thinned(
        [
            (name, dtype, first_stage, total)
            for name in NAMES
            for dtype in ("float16", "float32", "int8", "binary")
            for first_stage in (("auto",) if name == "vse-fc" else ("auto", "fde"))
            for total in (1, 4)
        ],
        ("chan", "float16", "fde", 4),
    ),
)
def test_merged_parts_are_byte_for_byte_the_index_of_one_process(
    models, splits, tmp_path, name, dtype, first_stage, total
) -> None:
    settings = PartSettings(models[name], None, dtype)
    reports = [
        encode_part(tmp_path / "parts", splits, Part(number, total), settings)
        for number in reversed(range(1, total + 1))
    ]
    assert sum(report.images for report in reports) == 127
    assert sum(report.captions for report in reports) == 253
    stage = {"first_stage": first_stage}
    index, added = merge(tmp_path / "parts", splits, settings, **stage)
    whole = one_process(tmp_path / "whole", models[name], splits, dtype=dtype, **stage)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert (added.images, added.captions) == (127, 253)
    assert len(added.left_out) == 2
    assert index.check() == []
    found = [hit.id for hit in index.search("a dog and a cat near the car").hits]
    assert found == [hit.id for hit in whole.search("a dog and a cat near the car").hits]


@pytest.mark.slow
def test_a_retriever_is_merged_too(models, splits, tmp_path) -> None:
    settings = PartSettings(models["naaf"], models["vse-fc"], "float16")
    for number in (1, 2):
        encode_part(tmp_path / "parts", splits, Part(number, 2), settings)
    merge(tmp_path / "parts", splits, settings)
    one_process(tmp_path / "whole", models["naaf"], splits, retriever=models["vse-fc"])
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_an_interrupted_part_continues_where_it_stopped(models, splits, tmp_path) -> None:
    class Interrupted(Exception):
        pass

    class StopsAfterOne(Silent):
        def track(self, steps, label="", total=None, done=0):
            for number, step in enumerate(steps):
                if number == 1:
                    raise Interrupted
                yield step

    class Counts(Silent):
        steps = 0

        def track(self, steps, label="", total=None, done=0):
            for step in steps:
                self.steps += 1
                yield step

    settings = PartSettings(models["naaf"], None, "float16")
    with pytest.raises(Interrupted):
        encode_part(tmp_path / "out", splits, Part(1, 2), settings, progress=StopsAfterOne())
    encode_part(tmp_path / "out", splits, Part(2, 2), settings)
    with pytest.raises(DataError, match=r"part 1 of 2 is not complete.*--part 1/2"):
        merge(tmp_path / "out", splits, settings)
    rest = Counts()
    encode_part(tmp_path / "out", splits, Part(1, 2), settings, progress=rest)
    assert rest.steps == 3  # five of its seven blocks, two per commit
    merge(tmp_path / "out", splits, settings)
    one_process(tmp_path / "whole", models["naaf"], splits)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_missing_mismatched_or_damaged_part_is_named(models, concepts, splits, tmp_path) -> None:
    settings, out = PartSettings(models["vse-fc"], None, "float16"), tmp_path / "out"
    encode_part(out, splits, Part(1, 2), settings)
    with pytest.raises(DataError, match="part 2 of 2 missing"):
        merge(out, splits, settings)
    other = replace(settings, model=cf.create("vse-fc", concepts, seed=5, **SMALL).eval())
    encode_part(out, splits, Part(2, 2), other)
    with pytest.raises(DataError, match="part 2 of 2 was made with another model"):
        merge(out, splits, settings)
    encode_part(out, splits, Part(2, 2), settings, overwrite=True)
    with pytest.raises(DataError, match="part 1 of 2 was made with another dtype"):
        merge(out, splits, replace(settings, dtype="float32"))
    with pytest.raises(DataError, match="part 1 of 2 was made with another data set"):
        merge(out, splits[:1], settings)
    victim = next((parts_folder(out) / "part-2-of-2").rglob("pooled.bin"))
    data = bytearray(victim.read_bytes())
    data[10] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"part 2 of 2 is damaged .*--part 2/2 --overwrite"):
        merge(out, splits, settings)
    shutil.rmtree(parts_folder(out) / "part-2-of-2" / "items")
    with pytest.raises(DataError, match="part 2 of 2 is damaged"):
        merge(out, splits, settings)
    assert not out.exists()


def test_parts_of_other_features_are_refused(models, concepts, splits, tmp_path) -> None:
    settings, out = PartSettings(models["vse-fc"], None, "float16"), tmp_path / "out"
    encode_part(out, splits, Part(1, 2), settings)
    table = splits[1].fragments
    np.save(tmp_path / "other.npy", table.features.whole() + 1)
    other = replace(table, features=ArrayFile(tmp_path / "other.npy"))
    changed = [splits[0], replace(splits[1], fragments=other)]
    with pytest.raises(DataError, match="part 1 of 2 was made with another features"):
        encode_part(out, changed, Part(1, 2), settings)
    encode_part(out, changed, Part(2, 2), settings)
    with pytest.raises(DataError, match="part 2 of 2 was made with another features"):
        merge(out, splits, settings)


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit on open files")
def test_a_merge_raises_the_limit_on_open_files_or_names_it(
    models, splits, tmp_path, monkeypatch
) -> None:
    import resource

    settings, out = PartSettings(models["vse-fc"], None, "float16"), tmp_path / "out"
    for number in range(1, 8):
        encode_part(out, splits, Part(number, 7), settings)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/dev/fd")}
    # the limit is on the number of a file, so those above it leave as many free below
    low = next(n for n in count(13) if n - sum(one < n for one in used) == 12)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
        MergedParts.open(out, splits, settings)
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
        monkeypatch.setattr(parts, "_raise_file_limit", lambda: None)
        with pytest.raises(ConfigError, match=r"too many open files .* ulimit -n"):
            MergedParts.open(out, splits, settings)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_two_writers_of_one_part_are_refused(models, splits, tmp_path) -> None:
    folder = Part(1, 2).folder(tmp_path / "out")
    folder.mkdir(parents=True)
    settings = PartSettings(models["vse-fc"], None, "float16")
    with held(folder / LOCK), pytest.raises(BusyError, match="making part 1 of 2"):
        encode_part(tmp_path / "out", splits, Part(1, 2), settings)


@pytest.mark.slow
def test_processes_of_torchrun_build_one_index(concepts, models, tmp_path) -> None:
    """With blocks of their usual size; the second process has no block of so few images."""
    from counterfoil.data import convert

    convert(concepts, tmp_path / "data", "scan")
    cf.save_pretrained(models["vse-fc"], tmp_path / "model")
    words = ["-m", "counterfoil", "index", str(tmp_path / "model"), str(tmp_path / "data")]
    words += ["--recall-queries", "0", "--cache", str(tmp_path / "cache"), "--out"]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for command in (
        [*words, str(tmp_path / "whole")],
        [*run, *words, str(tmp_path / "parts"), "--part", "auto"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
