"""WebDataset shards."""

from __future__ import annotations

import gzip
import json
import pickle

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.data import load_pairs
from tests.data.tiny import kinds, npy_bytes, png, write_tar


def sample(key, captions, split=None, **more):
    record = {"id": key, "captions": captions, **({"split": split} if split else {}), **more}
    return {f"{key}.png": png(len(key)), f"{key}.json": json.dumps(record).encode()}


def test_images_stay_in_the_shard_and_are_read_by_byte_range(tmp_path):
    write_tar(tmp_path / "x-0.tar", {**sample("a", ["p", "q"], "train", file="A b.png", n=1)})
    write_tar(tmp_path / "x-1.tar", {**sample("bb", ["r"], "train")})
    for path in (tmp_path, tmp_path / "x-0.tar"):
        train = load_pairs(path).train
        assert train.captions[0] == ["p", "q"]
        assert train.pixels[0].read() == png(1)
        assert train.pixels[0].name == "A b.png"
        assert train.extras[0] == {"n": 1}
    assert load_pairs(tmp_path).train.pixels[1].name == "bb.png"


def test_the_split_is_that_of_the_record_else_of_the_file_else_a_hash(tmp_path):
    write_tar(tmp_path / "set-val-0.tar", {**sample("a", ["x"], "testall"), **sample("b", ["y"])})
    pairs = load_pairs(tmp_path)
    assert {s.name: list(s.ids) for s in pairs} == {"val": ["b"], "testall": ["a"]}
    assert pairs.dev is pairs["val"]
    write_tar(tmp_path / "more.tar", sample("c", ["z"]))
    assert kinds(load_pairs(tmp_path).problems) == {"partly-hashed-split"}


def test_shard_ten_comes_after_shard_two(tmp_path):
    for number in (10, 2, 1):
        write_tar(tmp_path / f"train-{number}.tar", sample(str(number), ["x"]))
    assert list(load_pairs(tmp_path).train.ids) == ["1", "2", "10"]


def test_a_text_member_is_a_caption_and_members_need_not_be_adjacent(tmp_path):
    members = {"k/a.jpg": png(), "k/b.c.webp": png(), "k/a.txt": b"hello\n", "k/b.c.txt": b" x"}
    write_tar(tmp_path / "train.tar", {**members, "k/a.cls": b"3", "readme": b""})
    train = load_pairs(tmp_path).train
    assert dict(zip(train.ids, train.captions, strict=True)) == {"a": ["hello"], "b.c": [" x"]}


def test_a_record_may_say_caption_or_text(tmp_path):
    for key in ("caption", "text"):
        record = json.dumps({key: "words"}).encode()
        write_tar(tmp_path / "train.tar", {"a.jpg": png(), "a.json": record, "a.txt": b"no"})
        assert load_pairs(tmp_path).train.captions[0] == ["words"]


def test_fragments_and_boxes_are_members(tmp_path):
    members = {}
    for key, count in (("a", 2), ("b", 3)):
        members |= sample(key, ["x"], "train", box_size=[10, 20])
        members[f"{key}.fragments.npy"] = npy_bytes(np.full((count, 4), count, np.float16))
        members[f"{key}.boxes.npy"] = npy_bytes(np.full((count, 4), 5, np.float32))
    write_tar(tmp_path / "0.tar", members)
    table = load_pairs(tmp_path).train.fragments
    for used in (table, pickle.loads(pickle.dumps(table))):  # noqa: S301 - workers pickle it
        assert (used.dim, used.max_fragments, str(used.features.dtype)) == (4, 3, "float16")
        assert [len(used.read(i)) for i in (0, 1)] == [2, 3]
        np.testing.assert_array_equal(used.read(1).features, np.full((3, 4), 3))
        np.testing.assert_array_equal(used.read(0).boxes[0], [0.5, 0.25, 0.5, 0.25])
        assert used.features.rows([1, 0]).shape == (2, 3, 4)


def test_an_image_without_fragments_is_skipped_where_others_have_them(tmp_path):
    members = {**sample("a", ["x"], "train"), **sample("b", ["y"], "train")}
    members["b.fragments.npy"] = npy_bytes(np.ones((2, 4), np.float32))
    write_tar(tmp_path / "0.tar", members)
    pairs = load_pairs(tmp_path)
    assert list(pairs.train.ids) == ["b"]
    assert kinds(pairs.problems) == {"missing-features"}
    np.testing.assert_array_equal(pairs.train.fragments.read(0).features, np.ones((2, 4)))


@pytest.mark.parametrize("cut", [100, 512, 600, 1024, 1500, 2048, 2500])
def test_a_shard_that_was_cut_anywhere_is_fatal(tmp_path, cut):
    whole = write_tar(tmp_path / "train.tar", {**sample("a", ["x"]), **sample("b", ["y"])})
    data = whole.read_bytes()
    assert len(data) > 4 * 1024
    whole.write_bytes(data[:cut])
    with pytest.raises(DataError, match="truncated-tar"):
        load_pairs(tmp_path)


def test_an_empty_file_is_not_a_shard(tmp_path):
    (tmp_path / "train.tar").write_bytes(b"")
    with pytest.raises(DataError, match="truncated-tar"):
        load_pairs(tmp_path)


def test_a_compressed_shard_is_refused_with_the_reason(tmp_path):
    plain = write_tar(tmp_path / "x.tar", sample("a", ["x"]))
    (tmp_path / "train.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    with pytest.raises(DataError, match=r"gzip.*decompress it first"):
        load_pairs(tmp_path)


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"a.json": b"{"}, "bad-json"),
        ({"a.json": b"[]"}, "bad-json"),
        ({"a.json": b'{"text": "\xff"}'}, "bad-encoding"),
        ({"../a.json": b"{}"}, "unsafe-path"),
        ({"a.png": b"", "a.json": b'{"text": "x", "file": "../../b"}'}, "unsafe-path"),
        ({"a.json": b'{"text": "x"}', "a.fragments.npy": b"short"}, "bad-array"),
        ({"a.json": b'{"text":"x"}', "a.fragments.npy": npy_bytes(np.ones((2, 2)))[:-8]},
         "truncated-array"),
        ({"a.json": b'{"text":"x"}', "a.fragments.npy": npy_bytes(np.ones((2, 2), int))},
         "wrong-dtype"),
        ({"a.json": b'{"text":"x"}', "a.fragments.npy": npy_bytes(np.ones((2, 2, 2)))},
         "wrong-shape"),
        ({"a.json": b'{"text":"x","id":"ok"}'}, "duplicate-id"),
    ],
)  # fmt: skip
def test_faults_of_members_are_fatal_and_the_rest_is_read(tmp_path, members, kind):
    write_tar(tmp_path / "train.tar", {**sample("ok", ["fine"]), **members})
    with pytest.raises(DataError, match=kind):
        load_pairs(tmp_path)
    assert "ok" in load_pairs(tmp_path, strict=False).train.ids
