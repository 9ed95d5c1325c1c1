"""Precomputed features in SCAN's layout and vse_infty's."""

from __future__ import annotations

import os
import pickle
import resource

import numpy as np
import pytest
from numpy.lib import format as npy

from counterfoil.core.errors import DataError
from counterfoil.data import load_pairs
from tests.data.tiny import features, kinds, write_images, write_json, write_lines, write_scan


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("times", [1, 5])
def test_images_stored_once_or_five_times_are_the_same_data(tmp_path, times, ids):
    array = write_scan(tmp_path, "train", 4, times=times, ids=ids)
    train = load_pairs(tmp_path).train
    assert len(train) == 4
    assert list(train.ids) == (
        ["100", "101", "102", "103"] if ids else [f"train-{i}" for i in range(4)]
    )
    assert train.captions[2] == [f"caption {k} of image 2" for k in range(5)]
    for image in range(4):
        np.testing.assert_array_equal(train.fragments.read(image).features, array[image])


def test_images_stored_five_times_with_an_id_each_or_an_id_a_caption(tmp_path):
    for folder, ids in (("once", ["7", "8"]), ("caption", [str(i) for i in range(10)])):
        array = write_scan(tmp_path / folder, "dev", 2, times=5, ids=False)
        write_lines(tmp_path / folder / "dev_ids.txt", ids)
        dev = load_pairs(tmp_path / folder).dev
        assert list(dev.ids) == ([ids[0], ids[1]] if folder == "once" else ["0", "5"])
        np.testing.assert_array_equal(dev.fragments.read(1).features, array[1])


def test_one_caption_an_image_stays_one_even_where_all_features_are_equal(tmp_path):
    np.save(tmp_path / "train_ims.npy", np.ones((10, 2, 3), np.float32))
    write_lines(tmp_path / "train_caps.txt", [f"c {i}" for i in range(10)])
    write_lines(tmp_path / "train_ids.txt", [str(i) for i in range(10)])
    assert len(load_pairs(tmp_path).train) == 10


@pytest.mark.parametrize("each", [1, 2, 3, 7])
def test_any_even_number_of_captions_an_image_is_read(tmp_path, each):
    write_scan(tmp_path, "train", 4, each=each)
    train = load_pairs(tmp_path).train
    assert [len(captions) for captions in train.captions] == [each] * 4


def test_test_and_testall_are_two_splits_and_may_share_images(tmp_path):
    write_scan(tmp_path, "test", 2)
    write_scan(tmp_path, "testall", 6)
    pairs = load_pairs(tmp_path)
    assert (len(pairs["test"]), len(pairs["testall"])) == (2, 6)
    assert "shared-ids" not in kinds(pairs.problems)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_half_and_single_precision_are_read_as_single(tmp_path, dtype):
    write_scan(tmp_path, "train", 2)
    np.save(tmp_path / "train_ims.npy", features(2, dtype=dtype))
    fragments = load_pairs(tmp_path).train.fragments
    assert fragments.features.dtype == dtype
    assert fragments.read(0).features.dtype == np.float32


@pytest.mark.slow
def test_opening_five_gigabytes_reads_almost_nothing(tmp_path):
    write_scan(tmp_path, "train", 2)
    shape = (20_000, 32, 2048)
    with (tmp_path / "train_ims.npy").open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.truncate(file.tell() + int(np.prod(shape)) * 4)
    assert os.path.getsize(tmp_path / "train_ims.npy") > 5e9
    for each in (5, 1):
        write_lines(tmp_path / "train_caps.txt", ["a caption"] * 20_000 * each)
        write_lines(tmp_path / "train_ids.txt", [str(i) for i in range(20_000)])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        train = load_pairs(tmp_path).train
        assert train.fragments.read(19_999).features.shape == (32, 2048)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


class _Size:
    def __init__(self, w, h):
        self.image_w, self.image_h = w, h


@pytest.mark.parametrize("kind", ["numbers", "dicts", "objects"])
def test_boxes_in_pixels_are_scaled_by_the_image_size(tmp_path, kind):
    write_scan(tmp_path, "train", 2)
    boxes = np.tile(np.array([10, 20, 50, 100], np.float32), (2, 3, 1))
    np.save(tmp_path / "train_ims_bbx.npy", boxes)
    sizes = [(100, 200), (50, 100)]
    if kind == "numbers":
        saved = np.array(sizes)
    elif kind == "dicts":
        saved = np.array([{"image_w": w, "image_h": np.int64(h)} for w, h in sizes])
    else:
        saved = np.array([_Size(w, h) for w, h in sizes])
    np.save(tmp_path / "train_ims_size.npy", saved, allow_pickle=True)
    fragments = load_pairs(tmp_path).train.fragments
    np.testing.assert_allclose(fragments.read(0).boxes[0], [0.1, 0.1, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(fragments.read(1).boxes[2], [0.2, 0.2, 1.0, 1.0], rtol=1e-6)


class _Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_of_sizes_is_refused_and_never_runs(tmp_path):
    write_scan(tmp_path, "train", 1)
    np.save(tmp_path / "train_ims_bbx.npy", np.ones((1, 3, 4), np.float32))
    for payload in (
        np.array([_Hostile(tmp_path / "pwned")], dtype=object),
        np.array([{"image_w": 1, "image_h": 1, "x": _Hostile(tmp_path / "pwned")}]),
    ):
        np.save(tmp_path / "train_ims_size.npy", payload, allow_pickle=True)
        pairs = load_pairs(tmp_path, strict=False)
        assert "unsafe-pickle" in kinds(pairs.problems)
        assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("call", [b"cbuiltins\neval\n(V1+1\ntR.", b"cos\nsystem\n(Vtrue\ntR."])
def test_calls_in_a_pickle_of_sizes_are_refused(tmp_path, call):
    write_scan(tmp_path, "train", 1)
    np.save(tmp_path / "train_ims_bbx.npy", np.ones((1, 3, 4), np.float32))
    with (tmp_path / "train_ims_size.npy").open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        file.write(call)
    with pytest.raises(DataError, match="unsafe-pickle"):
        load_pairs(tmp_path)
    assert pickle.loads(b"I1\n.") == 1  # noqa: S301 - the payload's form is that of a pickle


def test_vse_infty_keeps_its_files_in_precomp_and_names_images_by_id(tmp_path):
    write_scan(tmp_path / "precomp", "train", 2)
    write_json(tmp_path / "id_mapping.json", {"100": "train2014/a.png", "101": "train2014/b.png"})
    write_images(tmp_path / "images", ["train2014/a.png", "train2014/b.png"])
    for path in (tmp_path, tmp_path / "precomp"):
        train = load_pairs(path).train
        assert [image.name for image in train.pixels] == ["a.png", "b.png"]
        assert train.fragments is not None
    (tmp_path / "precomp/train_ims.npy").unlink()
    assert load_pairs(tmp_path).train.fragments is None


def test_a_mapping_without_images_still_gives_their_names(tmp_path):
    write_scan(tmp_path / "precomp", "train", 1)
    write_json(tmp_path / "id_mapping.json", {"100": "a.png"})
    pairs = load_pairs(tmp_path)
    assert pairs.train.pixels is None
    assert pairs.train.extras == [{"file": "a.png"}]
    assert "no-image-folder" in kinds(pairs.problems)


def test_captions_keep_tabs_and_odd_line_separators_and_lose_a_byte_order_mark(tmp_path):
    np.save(tmp_path / "train_ims.npy", features(1))
    text = "\ufeffa\tb\nc\u2028d\r\n\x85e\n"
    (tmp_path / "train_caps.txt").write_bytes(text.encode())
    assert load_pairs(tmp_path).train.captions[0] == ["a\tb", "c\u2028d", "\x85e"]


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda f: (f / "train_caps.txt").unlink(), "missing-file"),
        (lambda f: (f / "train_ims.npy").unlink(), "missing-file"),
        (lambda f: write_lines(f / "train_caps.txt", ["x"] * 9), "count-mismatch"),
        (lambda f: write_lines(f / "train_caps.txt", ["x"]), "count-mismatch"),
        (lambda f: write_lines(f / "train_ids.txt", ["1", "2", "3"]), "count-mismatch"),
        (lambda f: write_lines(f / "train_ids.txt", ["1", "1"]), "duplicate-id"),
        (lambda f: os.truncate(f / "train_ims.npy", 150), "truncated-array"),
        (lambda f: os.truncate(f / "train_ims.npy", 20), "bad-array"),
        (lambda f: (f / "train_ims.npy").write_bytes(b""), "bad-array"),
        (lambda f: np.save(f / "train_ims.npy", np.ones((2, 3, 4), int)), "wrong-dtype"),
        (lambda f: np.save(f / "train_ims.npy", np.ones(2)), "wrong-shape"),
        (lambda f: np.save(f / "train_ims.npy", np.ones((2, 1, 1, 1))), "wrong-shape"),
        (lambda f: np.save(f / "train_ims.npy", np.array([{}, {}])), "wrong-dtype"),
        (lambda f: np.save(f / "train_ims_bbx.npy", np.ones((2, 2, 4))), "wrong-shape"),
        (lambda f: np.save(f / "train_ims_lens.npy", np.array([1, 9])), "wrong-shape"),
        (lambda f: (f / "train_caps.txt").write_bytes(b"a\n\xff\n" + b"b\n" * 8), "bad-encoding"),
        (lambda f: (f / "train_items.jsonl").write_bytes(b"{]\n"), "bad-json"),
        (lambda f: (f / "train_items.jsonl").write_bytes(b'{"id": 1}\n'), "bad-json"),
    ],
)
def test_a_fault_of_the_whole_is_fatal_and_does_not_hide_other_splits(tmp_path, spoil, kind):
    write_scan(tmp_path, "train", 2)
    write_scan(tmp_path, "test", 2)
    spoil(tmp_path)
    with pytest.raises(DataError, match=kind):
        load_pairs(tmp_path)
    assert len(load_pairs(tmp_path, strict=False)["test"]) == 2


def test_a_stray_byte_is_named_with_file_and_line(tmp_path):
    write_scan(tmp_path, "train", 1)
    (tmp_path / "train_caps.txt").write_bytes(b"a\nb\nc\nd\xe9\ne\n")
    with pytest.raises(DataError, match=r"train_caps\.txt:4: not UTF-8: byte 0xe9 at position 2"):
        load_pairs(tmp_path)


def test_empty_and_endless_captions_are_dropped_and_the_rest_stays_aligned(tmp_path):
    np.save(tmp_path / "train_ims.npy", array := features(3))
    long = "word " * 10_000
    write_lines(tmp_path / "train_caps.txt", ["a", "", " ", "\t", "b", long])
    write_lines(tmp_path / "train_ids.txt", ["1", "2", "3"])
    pairs = load_pairs(tmp_path)
    assert list(pairs.train.ids) == ["1", "3"]
    assert [list(c) for c in pairs.train.captions] == [["a"], ["b"]]
    np.testing.assert_array_equal(pairs.train.fragments.read(1).features, array[2])
    assert kinds(pairs.problems) == {"empty-caption", "long-caption", "no-captions"}
    places = [p.where for p in pairs.problems if p.kind == "long-caption"]
    assert places[0].endswith("train_caps.txt:6")
