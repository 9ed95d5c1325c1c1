"""Conversion loses nothing, and leaves either everything or nothing."""

from __future__ import annotations

import os
import tempfile
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import BusyError, ConfigError, DataError
from counterfoil.core.storage.atomic import staged_folder
from counterfoil.data import ArrayFile, FileImage, FragmentTable, Pairs, Split, convert, load_pairs
from counterfoil.data.convert import DATA_SET_FILES, refuse_loss
from tests.data.tiny import assert_same, kinds, make_pairs, png, write_images
from tests.holding import content

FORMATS = ["scan", "jsonl", "shards"]
ODD_TEXTS = [
    "a\tb",
    "line\nbreak",
    "carriage\rreturn",
    "\u2028 separators \x85\x0b\x1c",
    "  spaces  ",
    "",
    "\ufeffmark",
    "日本語 😀 é",
    '"quoted", comma',
    "\x00 nul",
    "{json}",
    "half \ud800 pair",
]
ODD = {
    "train": [ODD_TEXTS, ["one"], [], ["two", "three"]],
    "testall": [["x"] * 5, ["y"], ["z", ""]],
}
REGULAR = {"train": [[f"caption {k} of {i}" for k in range(5)] for i in range(3)]}

texts = st.text(st.characters(codec=None), max_size=12)
captions = st.dictionaries(
    st.sampled_from(["train", "dev", "val", "test", "testall", "my-split"]),
    st.lists(st.lists(texts, max_size=3), min_size=1, max_size=7),
    min_size=1,
    max_size=2,
)
relaxed = settings(
    max_examples=settings.default.max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


def back(pairs: Pairs, folder: Path, format: str) -> Pairs:
    convert(pairs, folder, format, shard_size=2)
    return load_pairs(folder, strict=False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fragments", ["ragged", "full", "single", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", ">f4"])
def test_everything_survives_a_round_trip(tmp_path, format, fragments, dtype):
    pairs = make_pairs(tmp_path / "in", ODD, fragments=fragments, dtype=dtype)
    assert_same(pairs, back(pairs, tmp_path / "out", format))


@pytest.mark.parametrize(("first", "second"), list(product(FORMATS, FORMATS)))
def test_everything_survives_two_conversions(tmp_path, first, second):
    pairs = make_pairs(tmp_path / "in", ODD)
    middle = back(pairs, tmp_path / "one", first)
    assert_same(pairs, back(middle, tmp_path / "two", second))


@pytest.mark.parametrize("format", FORMATS)
@given(captions=captions, pixels=st.booleans(), fragments=st.sampled_from(["ragged", None]))
@relaxed
def test_any_captions_and_counts_survive(format, captions, pixels, fragments):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pairs = make_pairs(root / "in", captions, pixels=pixels, fragments=fragments)
        assert_same(pairs, back(pairs, root / "out", format))


@given(captions=captions, chain=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)))
@relaxed
def test_any_captions_survive_a_chain_of_two(captions, chain):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pairs = make_pairs(root / "in", captions, ids="{i}")
        middle = back(pairs, root / "one", chain[0])
        assert_same(pairs, back(middle, root / "two", chain[1]))


def test_regular_data_becomes_exactly_the_scan_layout(tmp_path):
    pairs = make_pairs(
        tmp_path / "in", REGULAR, pixels=False, extras=False, fragments="full", ids="{i}"
    )
    convert(pairs, tmp_path / "out", "scan")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["train_caps.txt", "train_ids.txt", "train_ims.npy"]
    assert (tmp_path / "out/train_ids.txt").read_text() == "0\n1\n2\n"
    assert (tmp_path / "out/train_caps.txt").read_text().splitlines()[5] == "caption 0 of 1"
    stored = np.load(tmp_path / "in/train_f.npy")
    assert np.load(tmp_path / "out/train_ims.npy").tobytes() == stored.tobytes()
    assert_same(pairs, load_pairs(tmp_path / "out"))


def test_odd_data_still_leaves_plain_scan_files_of_one_line_a_caption(tmp_path):
    pairs = make_pairs(tmp_path / "in", {"test": [["a\nb", "c"], ["d", "e"]]})
    convert(pairs, tmp_path / "out", "scan")
    assert (tmp_path / "out/test_caps.txt").read_text() == "a b\nc\nd\ne\n"
    assert (tmp_path / "out/test_ids.txt").read_text() == "0\n1\n"
    assert np.load(tmp_path / "out/test_ims.npy").shape == (2, 3, 5)
    assert (tmp_path / "out/test_items.jsonl").exists()


def test_one_caption_an_image_in_fives_is_not_taken_for_repetition(tmp_path):
    np.save(tmp_path / "f.npy", np.repeat(np.eye(2, dtype=np.float32), 5, axis=0))
    table = FragmentTable(ArrayFile(tmp_path / "f.npy"), np.arange(10))
    split = Split("train", [str(i) for i in range(10)], [[f"c {i}"] for i in range(10)])
    pairs = Pairs("ones", {"train": Split("train", split.ids, split.captions, fragments=table)})
    assert_same(pairs, back(pairs, tmp_path / "out", "scan"))


def test_without_features_scan_has_captions_and_says_so(tmp_path):
    pairs = make_pairs(tmp_path / "in", REGULAR, fragments=None, extras=False)
    report = convert(pairs, tmp_path / "out", "scan")
    assert kinds(report.problems) == {"no-features"}
    assert_same(pairs, load_pairs(tmp_path / "out"))


@pytest.mark.parametrize("format", FORMATS)
def test_images_of_one_name_keep_it_and_shared_images_are_written_once(tmp_path, format):
    write_images(tmp_path, ["a/x.jpg", "b/x.jpg", "b/.hidden"])
    a, b, c = (FileImage(tmp_path / name) for name in ("a/x.jpg", "b/x.jpg", "b/.hidden"))
    pairs = Pairs(
        "same",
        {
            "test": Split("test", ["1", "2", "3"], [["p"], ["q"], ["r"]], pixels=[a, b, c]),
            "testall": Split("testall", ["1"], [["p"]], pixels=[a]),
        },
    )
    assert_same(pairs, back(pairs, tmp_path / "out", format))
    if format != "shards":
        assert len(list((tmp_path / "out/images").iterdir())) == 3


@pytest.mark.parametrize("format", FORMATS)
def test_an_image_that_is_gone_is_reported_and_its_captions_are_kept(tmp_path, format):
    (tmp_path / "a.png").write_bytes(png())
    images = [FileImage(tmp_path / "a.png"), FileImage(tmp_path / "gone.png")]
    pairs = Pairs("p", {"train": Split("train", ["a", "b"], [["x"], ["y"]], pixels=images)})
    report = convert(pairs, tmp_path / "out", format)
    assert kinds(report.problems) >= {"missing-image"}
    again = load_pairs(tmp_path / "out", strict=False)
    assert list(again.train.ids) == ["a", "b"]
    assert again.train.pixels[1].name == "gone.png"
    assert "missing-image" in kinds(again.problems)
    assert list(load_pairs(tmp_path / "out").train.ids) == ["a"]


def test_shards_hold_as_many_images_as_asked_for_and_keep_their_order(tmp_path):
    pairs = make_pairs(tmp_path / "in", {"train": [[f"c {i}"] for i in range(25)]}, ids="{i}")
    convert(pairs, tmp_path / "out", "shards", shard_size=2)
    assert len(list((tmp_path / "out").glob("train-*.tar"))) == 13
    assert list(load_pairs(tmp_path / "out").train.ids) == [str(i) for i in range(25)]


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_data_gives_the_same_bytes(tmp_path, format):
    pairs = make_pairs(tmp_path / "in", ODD)
    for name in ("one", "two"):
        convert(pairs, tmp_path / name, format)
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()]
    assert files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_folder_that_is_not_empty_is_refused_unless_overwriting(tmp_path):
    pairs = make_pairs(tmp_path / "in", REGULAR)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("data")
    with pytest.raises(DataError, match="not empty"):
        convert(pairs, tmp_path / "out", "jsonl")
    (tmp_path / "out/precious").unlink()
    (tmp_path / "out/captions.jsonl").write_text("old")
    with pytest.raises(DataError, match=r"not empty; .* or replace it with --overwrite"):
        convert(pairs, tmp_path / "out", "jsonl")
    convert(pairs, tmp_path / "out", "jsonl", overwrite=True)
    assert (tmp_path / "out/captions.jsonl").read_text() != "old"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_what_is_no_data_set_is_never_overwritten(tmp_path):
    pairs = make_pairs(tmp_path / "in", REGULAR)
    convert(pairs, tmp_path / "out", "jsonl")
    (tmp_path / "out/precious").write_text("data")
    with pytest.raises(DataError, match="has 'precious', which is not part of a data set"):
        convert(pairs, tmp_path / "out", "jsonl", overwrite=True)
    assert (tmp_path / "out/precious").read_text() == "data"


@pytest.mark.parametrize("format", FORMATS)
def test_every_layout_can_be_overwritten(tmp_path, format):
    pairs = make_pairs(tmp_path / "in", ODD)
    for _ in range(2):
        convert(pairs, tmp_path / "out", format, overwrite=True)
    assert all(DATA_SET_FILES.fullmatch(path.name) for path in (tmp_path / "out").iterdir())


def test_images_that_would_not_be_written_again_are_not_deleted(tmp_path):
    pairs = back(make_pairs(tmp_path / "in", ODD), tmp_path / "out", "jsonl")
    extra = tmp_path / "out/images/one-more.png"
    extra.write_bytes(b"a photo without a caption")
    with pytest.raises(DataError, match=r"would delete files .* \(1, such as one-more\.png\)"):
        convert(pairs, tmp_path / "out", "shards", overwrite=True)
    with pytest.raises(DataError, match="would delete"):
        refuse_loss(pairs, tmp_path / "out", images=False)
    refuse_loss(pairs, tmp_path / "elsewhere", images=False)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(DataError, match="would delete"):
        refuse_loss(load_pairs(tmp_path / "link", strict=False), tmp_path / "out")
    assert extra.exists()
    extra.rename(extra.with_name(".DS_Store"))
    refuse_loss(pairs, tmp_path / "out")


def test_images_in_shards_are_not_deleted_either(tmp_path):
    pairs = back(make_pairs(tmp_path / "in", ODD), tmp_path / "out", "shards")
    refuse_loss(pairs, tmp_path / "out")
    with pytest.raises(DataError, match="would delete"):
        refuse_loss(pairs, tmp_path / "out", images=False)


def test_a_data_set_can_replace_itself(tmp_path):
    pairs = make_pairs(tmp_path / "in", ODD)
    first = back(pairs, tmp_path / "out", "jsonl")
    convert(first, tmp_path / "out", "shards", overwrite=True)
    assert_same(pairs, load_pairs(tmp_path / "out", strict=False))


def test_the_working_directory_is_never_overwritten(tmp_path, monkeypatch):
    pairs = make_pairs(tmp_path / "in", REGULAR)
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(DataError, match="would delete"):
        convert(pairs, tmp_path, "jsonl", overwrite=True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_nothing_behind(tmp_path, format):
    resource = pytest.importorskip("resource")
    noise = png(1, (200, 200))
    (tmp_path / "a.png").write_bytes(noise)
    split = Split("train", ["a"], [["x"]], pixels=[FileImage(tmp_path / "a.png")])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(noise) // 2, before[1]))
    try:
        with pytest.raises(DataError, match="disk is full"):
            convert(Pairs("p", {"train": split}), tmp_path / "out", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["a.png"]


def test_an_interruption_leaves_nothing_behind(tmp_path):
    class Impatient:
        def track(self, items, description, total=None, done=0):
            yield next(iter(items))
            raise KeyboardInterrupt

    pairs = make_pairs(tmp_path / "in", REGULAR)
    with pytest.raises(KeyboardInterrupt):
        convert(pairs, tmp_path / "out", "shards", progress=Impatient())
    assert os.listdir(tmp_path) == ["in"]


def test_what_cannot_be_converted_is_refused(tmp_path):
    pairs = make_pairs(tmp_path / "in", REGULAR)
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        convert(pairs, tmp_path / "out", "json")
    with pytest.raises(ConfigError, match="shard_size"):
        convert(pairs, tmp_path / "out", "shards", shard_size=0)
    with pytest.raises(DataError, match="no images"):
        convert(Pairs("none", {}), tmp_path / "out", "jsonl")
    bad = Pairs("bad", {"../x": Split("../x", ["1"], [["a"]])})
    with pytest.raises(DataError, match="cannot be part of a file name"):
        convert(bad, tmp_path / "out", "jsonl")


@pytest.mark.parametrize("format", FORMATS)
def test_extras_named_like_columns_survive(tmp_path, format):
    names = ["id", " File ", "caption", "extras", "split", "original_name", "box_size"]
    extras = [{name: [name]} for name in names]
    split = Split("train", names, [["x", "y"]] * len(names), extras=extras)
    pairs = Pairs("p", {"train": split})
    assert_same(pairs, back(pairs, tmp_path / "out", format))


def test_the_report_counts_what_was_written(tmp_path):
    pairs = make_pairs(tmp_path / "in", ODD)
    report = convert(pairs, tmp_path / "out", "jsonl").as_dict()
    assert report["images"] == {"train": 4, "testall": 3}
    assert report["captions"] == {"train": 15, "testall": 8}
    assert report["files"] == sum(p.is_file() for p in (tmp_path / "out").rglob("*"))


def test_a_second_conversion_does_not_replace_what_the_first_is_writing(tmp_path) -> None:
    target = tmp_path / "data"
    with staged_folder(target, overwrite=False) as folder:
        (folder / "file").write_text("first")
        refused = []

        def second() -> None:
            with (
                pytest.raises(BusyError, match="another thread of this process is writing"),
                staged_folder(target, overwrite=True),
            ):
                pass
            refused.append(True)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert refused == [True]
    assert content(tmp_path) == {"data/file": b"first"}
