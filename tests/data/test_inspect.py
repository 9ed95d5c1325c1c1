"""Inspection counts what is there and names everything that is wrong."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.data import drop_unreadable, inspect, load_pairs
from counterfoil.data.pairs import Pairs, Split
from tests.data.tiny import (
    features,
    kinds,
    make_pairs,
    npy_bytes,
    png,
    write_images,
    write_lines,
    write_scan,
    write_tar,
)


def test_a_sound_data_set_is_summarized(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    rows = [
        {"image": "a.png", "split": "train", "captions": ["A dog runs.", "the dog"]},
        {"image": "b.png", "split": "train", "captions": ["a cat"]},
    ]
    write_lines(tmp_path / "captions.jsonl", [json.dumps(row) for row in rows])
    np.save(tmp_path / "train_ims.npy", features(2, dtype="float16"))
    result = inspect(tmp_path)
    assert result.usable
    assert result.problems == []
    train = result.splits["train"]
    assert (train.images, train.captions, train.vocabulary) == (2, 3, 5)
    assert train.captions_per_image == {"min": 1, "mean": 1.5, "max": 2}
    assert train.words_per_caption == {"mean": 2.33, "p95": pytest.approx(2.9), "max": 3}
    assert train.fragments == {"max": 3, "dim": 4, "dtype": "float16"}
    assert train.image_sizes["width"] == {"min": 6, "median": 6, "max": 6}
    assert (train.has_pixels, train.has_fragments, train.has_boxes) == (True, True, False)
    assert json.loads(json.dumps(result.as_dict()))["splits"]["train"]["captions"] == 3


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_captions_that_are_left_out_do_not_count(tmp_path, kind):
    write_images(tmp_path, ["a.png", "b.png"])
    rows = [("a.png", "A dog runs."), ("a.png", None), ("b.png", ""), ("b.png", "a cat runs")]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        images, captions = map(list, zip(*rows, strict=True))
        table = pyarrow.table({"image": images, "caption": captions, "split": ["train"] * 4})
        parquet.write_table(table, tmp_path / "captions.parquet")
    else:
        lines = [f"{image},{caption or ''},train" for image, caption in rows]
        write_lines(tmp_path / "captions.csv", ["image,caption,split", *lines])
    result = inspect(tmp_path, deep=False)
    train = result.splits["train"]
    assert result.as_dict()["problem_counts"]["empty-caption"] == 2
    assert (train.captions, train.captions_per_image["max"]) == (2, 1)
    assert train.words_per_caption == {"mean": 3.0, "p95": 3.0, "max": 3}


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        *((typo, True) for typo in ("trian", "tets", "vaildation", "Tain")),
        *((usual, False) for usual in ("holdout", "test1k", "testA", "trainval", "dev2", "nval")),
    ],
)
def test_a_likely_typo_in_a_split_is_noted(tmp_path, name, noted):
    pairs = make_pairs(tmp_path, {"train": [["a dog"]], name: [["a cat"]]})
    notes = [one.message for one in inspect(pairs, deep=False).problems if one.kind == "split-name"]
    assert len(notes) == noted
    assert all(f"split '{name}'" in note and "did you mean" in note for note in notes)


def test_one_of_each_fault_in_a_table_is_named(tmp_path):
    write_images(tmp_path, [f"{i}.png" for i in range(9)])
    (tmp_path / "torn.png").write_bytes(png()[:60])
    (tmp_path / "text.png").write_text("not an image")

    def line(image, captions, **more):
        return json.dumps({"image": image, "split": "train", "captions": captions, **more}).encode()

    lines = [
        line("0.png", ["fine"]),
        line("1.png", ["", "good"]),
        line("2.png", ["word " * 10_000]),
        line("3.png", []),
        line("4.png", ["x"], id="twice"),
        line("5.png", ["x"], id="twice"),
        line("gone.png", ["x"]),
        line("torn.png", ["x"]),
        line("text.png", ["x"]),
        line("../escape.png", ["x"]),
        line("6.png", [3]),
        b"{bad json",
        line("7.png", ["caf"]).replace(b"caf", b"caf\xe9"),
        b'{"image": "8.png", "split": "train"}',
    ]
    (tmp_path / "captions.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    array = features(20)
    array[0, 1, 2] = np.nan
    array[1, 0, 0] = np.inf
    np.save(tmp_path / "train_ims.npy", array)
    result = inspect(tmp_path)
    assert kinds(result.problems) >= {
        "empty-caption",
        "long-caption",
        "no-captions",
        "duplicate-id",
        "missing-image",
        "unreadable-image",
        "unsafe-path",
        "bad-caption",
        "bad-json",
        "bad-encoding",
        "missing-column",
        "count-mismatch",
        "non-finite",
    }
    counts = result.as_dict()["problem_counts"]
    assert (counts["unreadable-image"], counts["non-finite"]) == (2, 2)
    assert not result.usable
    assert result.splits["train"].images == 12


def test_one_of_each_fault_in_scan_files_is_named(tmp_path):
    write_scan(tmp_path, "train", 4)
    write_scan(tmp_path, "dev", 2)
    write_scan(tmp_path, "test", 2)
    write_scan(tmp_path, "testall", 2)
    array = features(4)
    array[2, 0, 0] = -np.inf
    np.save(tmp_path / "train_ims.npy", array)
    write_lines(tmp_path / "train_ids.txt", ["1", "1", "2", "3"])
    write_lines(tmp_path / "dev_caps.txt", ["", "x" * 5, "y", "w " * 1001, "z"])
    os.truncate(tmp_path / "test_ims.npy", 140)
    (tmp_path / "test_caps.txt").write_bytes(b"ok\nbad\xff\n" + b"x\n" * 8)
    (tmp_path / "testall_caps.txt").unlink()
    assert kinds(inspect(tmp_path).problems) >= {
        "duplicate-id",
        "non-finite",
        "count-mismatch",
        "empty-caption",
        "long-caption",
        "truncated-array",
        "bad-encoding",
        "missing-file",
    }


def test_one_of_each_fault_in_shards_is_named(tmp_path):
    bad = np.ones((2, 4), np.float32)
    bad[1, 1] = np.nan
    members = {
        "a.png": png(),
        "a.json": b'{"captions": ["x", ""]}',
        "a.fragments.npy": npy_bytes(bad),
        "b.png": b"junk",
        "b.json": b'{"caption": "y"}',
        "c.json": b"{",
    }
    write_tar(tmp_path / "train-0.tar", members)
    whole = write_tar(tmp_path / "train-1.tar", {"d.png": png(), "d.txt": b"z"})
    os.truncate(whole, 700)
    assert kinds(inspect(tmp_path).problems) >= {
        "empty-caption",
        "non-finite",
        "unreadable-image",
        "missing-features",
        "bad-json",
        "no-captions",
        "truncated-tar",
    }


def test_what_cannot_be_read_can_be_dropped(tmp_path):
    array = features(3)
    array[1, 0, 0] = np.nan
    write_scan(tmp_path, "train", 3)
    np.save(tmp_path / "train_ims.npy", array)
    pairs = drop_unreadable(load_pairs(tmp_path))
    assert list(pairs.train.ids) == ["100", "102"]
    assert kinds(pairs.problems) == {"non-finite"}
    np.testing.assert_array_equal(pairs.train.fragments.read(1).features, array[2])


def test_a_shallow_inspection_reads_no_features(tmp_path):
    array = features(2)
    array[:] = np.nan
    write_scan(tmp_path, "train", 2)
    np.save(tmp_path / "train_ims.npy", array)
    assert "non-finite" not in kinds(inspect(tmp_path, deep=False).problems)
    assert "non-finite" in kinds(inspect(tmp_path).problems)


def test_pairs_can_be_inspected_and_progress_is_told(tmp_path):
    told = []

    class Watching:
        def track(self, items, description, total=None, done=0):
            told.append((description, total))
            yield from items

        def note(self, text):
            return None

        def say(self, text):
            return None

    pairs = make_pairs(tmp_path, {"train": [["a"], ["b"]]})
    result = inspect(pairs, progress=Watching())
    assert result.splits["train"].has_boxes
    assert told == [("decoding train images", 2), ("reading train features", 2)]


def test_what_inspection_calls_skippable_is_what_loading_leaves_out(tmp_path):
    write_scan(tmp_path, "train", 3, each=1)
    write_lines(tmp_path / "train_caps.txt", ["a", " ", "c"])
    assert kinds(inspect(tmp_path).problems) == kinds(load_pairs(tmp_path).problems)


def test_a_folder_with_several_layouts_is_inspected_in_each_of_them(tmp_path) -> None:
    np.save(tmp_path / "train_ims.npy", np.full((2, 3, 4), np.nan, np.float32))
    (tmp_path / "train_caps.txt").write_text("a\nb\n")
    (tmp_path / "train_ids.txt").write_text("1\n2\n")
    (tmp_path / "x-000.tar").write_bytes(b"not an archive at all")
    kinds = {problem.kind for problem in inspect(tmp_path).problems}
    assert {"non-finite", "truncated-tar"} <= kinds


def test_captions_that_another_image_has_too_are_counted_in_each_split() -> None:
    captions = [["A pier.", "boats lie beside a long wooden pier"], ["a pier"], ["a  PIER!"],
                ["boats lie by a long pier"], ["a beach"]]  # fmt: skip
    test = Split("test", [f"image {n}" for n in range(5)], captions)
    dev = Split("dev", ["x", "y"], [["a pier", "A pier"], ["a forest"]])
    result = inspect(Pairs("small", {"test": test, "dev": dev}), deep=False)
    tree = result.as_dict()
    assert tree["splits"]["test"]["duplicate_captions"] == {"exact": 3, "near": 2}
    assert tree["splits"]["dev"]["duplicate_captions"] == {"exact": 0, "near": 0}
    notes = [problem for problem in result.problems if problem.kind == "identical-captions"]
    assert len(notes) == 1
    assert "3 of 6 captions of 'test' stand word for word at another image" in str(notes[0])


def test_empty_captions_are_not_captions_that_images_share() -> None:
    train = Split("train", ["a", "b"], [["a dog", ""], ["a cat", "  "]])
    test = Split("test", ["c"], [["a cow", ""]])
    result = inspect(Pairs("small", {"train": train, "test": test}), deep=False)
    assert result.splits["train"].duplicate_captions.exact == 0
    assert [shared.captions for shared in result.leakage] == [0]
    assert not kinds(result.problems) & {"identical-captions", "shared-captions"}


def write_captions(folder, names, split="train"):
    rows = [f"{name},a picture of {name},{split}" for name in names]
    return write_lines(folder / "captions.csv", ["image,caption,split", *rows])


def test_a_data_set_whose_images_are_all_missing_cannot_be_used(tmp_path):
    write_captions(tmp_path, ["a.png", "b.png"])
    result = inspect(tmp_path / "captions.csv")
    assert not result.usable
    fatal = [str(problem) for problem in result.problems if problem.severity.value == "fatal"]
    assert len(fatal) == 1
    assert "none of its 2 image files exists" in fatal[0]
    assert f"looked in {tmp_path}" in fatal[0]
    with pytest.raises(DataError, match="looked in"):
        load_pairs(tmp_path / "captions.csv")


@pytest.mark.parametrize("deep", [True, False])
def test_one_split_whose_images_are_all_missing_is_named(tmp_path, deep):
    write_images(tmp_path / "images", ["a.png", "b.png"])
    rows = ["a.png,one,train", "b.png,two,train", "lost.png,three,test"]
    write_lines(tmp_path / "captions.csv", ["image,caption,split", *rows])
    result = inspect(tmp_path, deep=deep)
    assert not result.usable
    assert any("split 'test': none of its 1 image files" in str(one) for one in result.problems)
    missing = next(str(one) for one in result.problems if one.kind == "missing-image")
    assert str(tmp_path / "images") in missing


def test_a_split_of_images_that_are_all_broken_cannot_be_used(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no image")
    result = inspect(write_captions(tmp_path, ["a.png", "b.png"]))
    assert not result.usable
    assert set(kinds(result.problems)) >= {"unreadable-image", "no-images"}


def test_inspection_says_how_many_images_training_would_set_aside(tmp_path):
    names = [f"{number}.png" for number in range(20)]
    write_images(tmp_path, names)
    result = inspect(write_captions(tmp_path, [*names, "lost.png"]))
    assert result.dev_set_aside == (4, 20)
    assert result.as_dict()["dev_set_aside"] == 4
    rows = [*names, "lost.png"]
    (tmp_path / "captions.csv").write_text(
        "image,caption,split\n"
        + "".join(f"{name},a picture,{('train', 'val')[name == '3.png']}\n" for name in rows)
    )
    assert inspect(tmp_path / "captions.csv").dev_set_aside is None
