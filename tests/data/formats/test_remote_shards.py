"""Shards at an address are the data set that they are on disk, and are trusted as little."""

from __future__ import annotations

import pickle
import tarfile

import numpy as np
import pytest

from counterfoil.core.errors import ConfigError, DataError, RemoteError
from counterfoil.core.storage import remote
from counterfoil.data import convert, inspect, load_pairs, open_image
from counterfoil.data.formats import remote_shards
from counterfoil.features import with_fragments
from tests.data.formats.test_shards import sample
from tests.data.tiny import kinds, npy_bytes, write_tar
from tests.range_server import range_server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    with range_server() as running:
        yield running


@pytest.fixture
def shards(tmp_path, concepts):
    """The concepts data set as shards of 20 images."""
    convert(concepts, tmp_path / "shards", "shards", shard_size=20)
    return sorted((tmp_path / "shards").iterdir())


ALL = "{train-{00000..00004},dev-{00000..00001},test-{00000..00001}}.tar"


def same(one, other) -> None:
    assert [split.name for split in one] == [split.name for split in other]
    for mine, theirs in zip(one, other, strict=True):
        assert list(mine.ids) == list(theirs.ids)
        assert list(map(list, mine.captions)) == list(map(list, theirs.captions))
        for image in range(0, len(mine), 7):
            a, b = mine.fragments.read(image), theirs.fragments.read(image)
            np.testing.assert_array_equal(a.features, b.features)
            np.testing.assert_array_equal(a.boxes, b.boxes)


def test_remote_shards_are_the_data_set_on_disk(server, shards, tmp_path) -> None:
    server.files = {path.name: path.read_bytes() for path in shards}
    pairs = load_pairs(f"{server.url}/{ALL}", cache_dir=tmp_path / "cache")
    local = load_pairs(shards[0].parent)
    same(pairs, local)
    table = pickle.loads(pickle.dumps(pairs.dev.fragments))  # noqa: S301 - workers pickle it
    np.testing.assert_array_equal(table.read(3).features, local.dev.fragments.read(3).features)


def test_the_contents_of_a_shard_are_read_once(server, shards, tmp_path) -> None:
    server.files = {path.name: path.read_bytes() for path in shards}
    url, cache = f"{server.url}/{ALL}", tmp_path / "cache"
    load_pairs(url, cache_dir=cache)
    server.requests.clear()
    again = load_pairs(url, cache_dir=cache)
    assert server.sent() == len(shards)  # one byte of each, for its size
    same(again, load_pairs(shards[0].parent))
    stored = sorted((cache / remote_shards.FOLDER).iterdir())
    assert sum(path.stat().st_size for path in stored) < sum(p.stat().st_size for p in shards)
    stored[0].write_bytes(stored[0].read_bytes().replace(b"train", b"drain"))
    same(load_pairs(url, cache_dir=cache), again)
    server.files["dev-00000.tar"] = server.files["dev-00001.tar"]
    with pytest.raises(DataError, match="duplicate-id"):  # the changed shard was read again
        load_pairs(url, cache_dir=cache)


def test_a_server_without_stamps_is_read_each_time(server, shards, tmp_path) -> None:
    server.files, server.has_stamp = {path.name: path.read_bytes() for path in shards}, False
    load_pairs(f"{server.url}/{ALL}", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_shards_in_object_storage_are_read_through_fsspec(shards, tmp_path) -> None:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for path in shards:
        system.pipe(f"/shards-test/{path.name}", path.read_bytes())
    pairs = load_pairs(f"memory://shards-test/{ALL}", cache_dir=tmp_path / "cache")
    same(pairs, load_pairs(shards[0].parent))


def test_pictures_are_read_and_features_extracted_from_remote_shards(server, tmp_path) -> None:
    members = {}
    for name in "abcdef":
        members |= sample(name, [f"a {name}"], "train")
    server.files["p.tar"] = write_tar(tmp_path / "p.tar", members).read_bytes()
    cache = tmp_path / "cache"
    pairs = load_pairs(f"{server.url}/p.tar", cache_dir=cache)
    assert open_image(pairs.train.pixels[2]).size == (6, 4)
    options = {"side": 32, "max_fragments": 2}
    one = with_fragments(pairs, cache, "segments", options, workers=1)
    two = with_fragments(load_pairs(tmp_path / "p.tar"), None, "segments", options, workers=1)
    for image in range(6):
        np.testing.assert_array_equal(
            one.train.fragments.read(image).features, two.train.fragments.read(image).features
        )


def test_a_missing_shard_is_named(server, shards, tmp_path) -> None:
    server.files = {path.name: path.read_bytes() for path in shards}
    with pytest.raises(DataError, match=r"train-00005\.tar: no such file \(404\)"):
        load_pairs(f"{server.url}/train-{{00000..00005}}.tar", cache_dir=tmp_path)


def test_a_server_that_is_down_is_a_remote_error(server, tmp_path) -> None:
    server.down_after = 0
    with pytest.raises(RemoteError, match="503"):
        load_pairs(f"{server.url}/train-0.tar", cache_dir=tmp_path)


@pytest.mark.parametrize("cut", [0, 100, 512, 1500, 2500])
def test_a_remote_shard_that_was_cut_is_fatal_and_not_stored(server, tmp_path, cut) -> None:
    whole = write_tar(tmp_path / "x.tar", {**sample("a", ["x"]), **sample("b", ["y"])})
    server.files["x.tar"] = whole.read_bytes()[:cut]
    with pytest.raises(DataError, match="truncated-tar"):
        load_pairs(f"{server.url}/x.tar", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"a.json": b"{"}, "bad-json"),
        ({"../a.json": b"{}"}, "unsafe-path"),
        ({"a.png": b"", "a.json": b'{"text": "x", "file": "../../b"}'}, "unsafe-path"),
        ({"a.json": b'{"text": "x"}', "a.fragments.npy": b"short"}, "bad-array"),
        ({"a.json": b'{"text": "x"}', "a.fragments.npy": b""}, "bad-array"),
        (
            {"a.json": b'{"text":"x"}', "a.fragments.npy": npy_bytes(np.ones((2, 2)))[:-8]},
            "truncated-array",
        ),
    ],
)
def test_hostile_members_are_found_as_in_local_shards(server, tmp_path, members, kind) -> None:
    server.files["train.tar"] = write_tar(tmp_path / "train.tar", members).read_bytes()
    found = inspect(f"{server.url}/train.tar", deep=False, cache_dir=tmp_path / "cache").problems
    assert kind in kinds(found)
    assert kinds(found) == kinds(inspect(tmp_path / "train.tar", deep=False).problems)


def test_a_problem_is_reported_each_time_a_shard_is_read(server, tmp_path) -> None:
    path = write_tar(tmp_path / "train.tar", sample("a", ["x"]))
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("b.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    server.files["train.tar"] = path.read_bytes()
    for _ in range(2):
        report = inspect(f"{server.url}/train.tar", deep=False, cache_dir=tmp_path / "cache")
        assert "not-a-file" in kinds(report.problems)


def test_sizes_are_limited(server, tmp_path, monkeypatch) -> None:
    head = npy_bytes(np.ones((1, 2), np.float32))
    huge = head.replace(b"(1, 2), ", b"(1, 268435456), ")[: len(head) - 8]
    members = {"a.json": b'{"text": "x"}', "a.fragments.npy": huge}
    server.files["train.tar"] = write_tar(tmp_path / "train.tar", members).read_bytes()
    with pytest.raises(DataError, match="large-member"):
        load_pairs(f"{server.url}/train.tar", cache_dir=tmp_path)
    monkeypatch.setattr(remote_shards, "CONTENTS_BYTES", 10)
    with pytest.raises(DataError, match="large-shard"):
        load_pairs(f"{server.url}/train.tar", cache_dir=tmp_path / "other")


def test_an_address_is_read_as_shards_only(tmp_path) -> None:
    with pytest.raises(ConfigError, match="format 'coco': an address names shards"):
        load_pairs("http://127.0.0.1:9/x.tar", "coco", cache_dir=tmp_path)
