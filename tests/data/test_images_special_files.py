"""Files in a data set that are no files, are endless or unpack to more than memory holds."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import ArrayError
from counterfoil.data import ArrayFile, inspect, load_pairs
from counterfoil.data.formats.feature_files import read_box_sizes
from counterfoil.data.images import FileImage, MemberImage, open_image
from counterfoil.data.text.vocabulary import Vocabulary, load_vectors
from tests.data.tiny import features, npy_bytes, png, write_images, write_scan, write_tar
from tests.special import SPECIAL, make_special, within

VOCABULARY = Vocabulary.build(["a dog runs"], min_count=1)


def problems(path: Path, format: str | None = None) -> str:
    result = within(30, lambda: inspect(path, format))
    return "\n".join(map(str, result.problems))


@pytest.mark.parametrize("kind", SPECIAL)
def test_an_image_that_is_no_regular_file_is_a_counted_skip(kind, tmp_path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    make_special(kind, tmp_path / "a.png")
    (tmp_path / "captions.csv").write_text("image,caption,split\na.png,a dog,train\nb.png,b,train")
    result = within(30, lambda: inspect(tmp_path))
    assert [p.kind for p in result.problems] == ["unreadable-image"]
    assert "not a regular file" in str(result.problems[0])
    assert result.usable


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name", ["train_caps.txt", "train_ids.txt", "train_ims.npy", "train_ims_lens.npy"]
)
def test_a_scan_file_that_is_no_regular_file_is_fatal(name, kind, tmp_path) -> None:
    write_scan(tmp_path, "train", 3)
    np.save(tmp_path / "train_ims_lens.npy", np.full(3, 3))
    make_special(kind, tmp_path / name)
    assert "not a regular file" in problems(tmp_path)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("dataset_x.json", "karpathy"),
        ("captions_train2017.json", "coco"),
        ("Flickr8k.token.txt", "flickr8k"),
        ("train-0000.tar", "shards"),
        ("captions.csv", "table"),
        ("captions.jsonl", "table"),
        ("captions.parquet", "table"),
    ],
)
def test_captions_that_are_no_regular_file_do_not_hang(name, format, kind, tmp_path) -> None:
    make_special(kind, tmp_path / name)
    for stated in (None, format):
        assert "not a regular file" in problems(tmp_path, stated)
    with pytest.raises(DataError, match="not a regular file or folder"):
        problems(tmp_path / name)


@pytest.mark.parametrize("kind", SPECIAL)
def test_single_files_that_are_no_regular_files_are_errors(kind, tmp_path) -> None:
    path = make_special(kind, tmp_path / "x")
    for read in (
        ArrayFile,
        read_box_sizes,
        Vocabulary.load,
        lambda p: load_vectors(p, VOCABULARY),
        lambda p: open_image(FileImage(p)),
        lambda p: open_image(MemberImage(p, "a.png", 0, 10)),
    ):
        with pytest.raises(DataError, match="not a regular file"):
            within(20, lambda read=read: read(path))


def test_an_endless_device_as_captions_ends_in_one_line(tmp_path) -> None:
    write_scan(tmp_path / "d", "train", 3)
    (tmp_path / "d" / "train_caps.txt").unlink()
    (tmp_path / "d" / "train_caps.txt").symlink_to("/dev/zero")
    inspected = ["data", "inspect", str(tmp_path / "d")]
    done = within(60, lambda: CliRunner().invoke(app, inspected))
    assert done.exit_code == 3, done.output
    assert isinstance(done.exception, SystemExit)
    assert "not a regular file but a device" in done.stdout


def test_text_files_beyond_their_limit_are_fatal_and_not_read(tmp_path) -> None:
    write_scan(tmp_path, "train", 3)
    for name in ("train_caps.txt", "train_ids.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**35)
    assert problems(tmp_path).count("too large") == 2
    for name in ("dataset_x.json", "captions_train2017.json"):
        (tmp_path / "j").mkdir(exist_ok=True)
        with (tmp_path / "j" / name).open("wb") as file:
            file.truncate(2**33)
    assert "too large" in problems(tmp_path / "j", "karpathy")
    assert "too large" in problems(tmp_path / "j", "coco")


def test_a_line_without_an_end_is_fatal(tmp_path) -> None:
    write_scan(tmp_path, "train", 3)
    with (tmp_path / "train_caps.txt").open("wb") as file:
        file.truncate(2**31)
    assert "a line of more than" in problems(tmp_path)


def _png(width: int, height: int, rows: int) -> bytes:
    """A black PNG that has so many of its rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    pixels = zlib.compress(bytes(rows * (width + 1)), 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch) -> None:
    (tmp_path / "bomb.png").write_bytes(_png(13_000, 13_000, rows=1))
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: decoded.append(self.size))
    with pytest.raises(
        DataError, match="13000 × 13000 pixels, refused, images of this kind have at most"
    ):
        open_image(FileImage(tmp_path / "bomb.png"))
    assert not decoded


def test_a_large_photo_is_read(tmp_path) -> None:
    (tmp_path / "photo.png").write_bytes(_png(3000, 2000, rows=2000))
    assert open_image(FileImage(tmp_path / "photo.png")).size == (3000, 2000)


def test_an_image_file_of_too_many_bytes_is_refused_unread(tmp_path) -> None:
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(DataError, match="too large"):
        open_image(FileImage(tmp_path / "a.jpg"))
    with pytest.raises(DataError, match="at most"):
        open_image(MemberImage(tmp_path / "a.jpg", "a.jpg", 0, 2**35))


def test_formats_that_start_programs_are_no_images(tmp_path) -> None:
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    (tmp_path / "a.png").write_bytes(eps)
    with pytest.raises(DataError, match=r"not an image of a known format .*JPEG"):
        open_image(FileImage(tmp_path / "a.png"))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_formats_of_photos_are_read(format, tmp_path) -> None:
    Image.new("RGB", (9, 7), "red").save(tmp_path / "a", format)
    assert open_image(FileImage(tmp_path / "a")).size == (9, 7)


def test_uploads_and_data_sets_share_one_list_of_formats() -> None:
    pictures = pytest.importorskip("counterfoil.app.images")
    from counterfoil.data.images import image_formats

    assert image_formats() == pictures.FORMATS
    assert "EPS" not in image_formats()


def header(shape: str, descr: str = "'<f4'") -> bytes:
    """The start of a .npy file with any text as its shape."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


SHAPES = [
    "(-1,)", "(-3, 4)", "(3, -4, 2)", "(-1, -1)",
    f"({2**62},)", f"({10**30},)", f"({2**32}, {2**32})",
    f"(0, {10**40})", f"({10**15}, 0)", "(" + "1, " * 70 + ")", f"({2**31}, {2**31}, {2**31})",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_of_impossible_shapes_are_errors(shape, tmp_path) -> None:
    path = tmp_path / "train_ims.npy"
    path.write_bytes(header(shape) + bytes(64))
    for read in (ArrayFile, read_box_sizes):
        with pytest.raises(ArrayError):
            read(path)
    write_scan(tmp_path / "d", "train", 3)
    (tmp_path / "d" / "train_ims.npy").write_bytes(header(shape) + bytes(64))
    assert not inspect(tmp_path / "d").usable
    write_tar(
        tmp_path / "train-0.tar",
        {"a.json": b'{"captions": ["x"]}', "a.fragments.npy": header(shape) + bytes(64)},
    )
    assert not inspect(tmp_path / "train-0.tar").usable


@pytest.mark.parametrize(
    "descr",
    ["'|V0'", "'<U0'", "[('a', '<f4')]", "'nonsense'", "('<f4', (1000000000,))", "7", "'O'"],
)
def test_arrays_of_other_than_plain_numbers_are_errors(descr, tmp_path) -> None:
    (tmp_path / "a.npy").write_bytes(header("(4,)", descr) + bytes(64))
    with pytest.raises(ArrayError):
        ArrayFile(tmp_path / "a.npy")


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_array_header_is_an_error_or_an_array(seed, tmp_path) -> None:
    data = bytearray(npy_bytes(features(3)))
    rng = np.random.default_rng(seed)
    for place in rng.integers(0, 128, 4):
        data[place] = rng.integers(0, 256)
    (tmp_path / "a.npy").write_bytes(data)
    with contextlib.suppress(DataError):
        ArrayFile(tmp_path / "a.npy").whole()


@pytest.mark.parametrize(
    "member",
    [header(f"({2**40}, 300)"), header("(-1, 3)"), b"", b"no array", header("(5,)", "'O'")],
)
def test_word_vectors_of_impossible_shapes_are_errors(member, tmp_path) -> None:
    path = tmp_path / "vectors.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("words.npy", npy_bytes(np.array(["a", "dog"])))
        archive.writestr("vectors.npy", member)
    with pytest.raises(DataError):
        load_vectors(path, VOCABULARY)


def test_word_vectors_in_an_npz_are_read(tmp_path) -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez_compressed(tmp_path / "v.npz", words=np.array(["a", "dog"]), vectors=table)
    result = load_vectors(tmp_path / "v.npz", VOCABULARY)
    assert result.count == 2
    np.testing.assert_array_equal(result.table[VOCABULARY.index["dog"]], table[1])


def test_a_shard_member_of_a_negative_size_is_fatal(tmp_path) -> None:
    path = write_tar(tmp_path / "train-0.tar", {"a.json": b"{}", "a.png": png()})
    data = bytearray(path.read_bytes())
    data[124:136] = b"\xff" * 12  # the size, as a negative number in base 256
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    assert not within(20, lambda: inspect(path)).usable


def test_a_parquet_file_that_unpacks_to_billions_of_rows_is_fatal(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    from counterfoil.data.formats import parquet as parquet_rows

    table = pyarrow.table({"image": ["a.png"] * 40, "caption": ["a dog"] * 40})
    parquet.write_table(table, tmp_path / "captions.parquet")
    assert "large-table" not in problems(tmp_path)
    limit, parquet_rows.MAX_ROWS = parquet_rows.MAX_ROWS, 39
    try:
        assert "large-table" in problems(tmp_path)
    finally:
        parquet_rows.MAX_ROWS = limit


def test_a_parquet_file_with_broken_text_is_fatal(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    bad = pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())
    table = pyarrow.table({"image": pyarrow.array(["a.png"]), "caption": bad})
    parquet.write_table(table, tmp_path / "captions.parquet")
    assert "bad-parquet" in problems(tmp_path)


def test_json_in_a_shard_beyond_its_limit_is_fatal(tmp_path, monkeypatch) -> None:
    record = json.dumps({"captions": ["a dog"] * 20}).encode()
    write_tar(tmp_path / "train-0.tar", {"a.json": record, "a.png": png()})
    load_pairs(tmp_path)
    shards = sys.modules["counterfoil.data.formats.shards"]
    monkeypatch.setattr(shards, "LINE_BYTES", 50)
    assert "large-member" in problems(tmp_path)


def test_a_caption_number_of_thousands_of_digits_is_a_bad_line(tmp_path) -> None:
    lines = [f"a.jpg#{'9' * 5000}\ta dog", "a.jpg#²\ta dog", "a.jpg#0\ta cat"]
    (tmp_path / "Flickr8k.token.txt").write_text("\n".join(lines))
    assert problems(tmp_path).count("bad-line") == 2


@pytest.mark.parametrize("value", [np.array(5.0), np.array({"image_w": 1}, dtype=object)])
def test_image_sizes_without_a_shape_are_told_what_was_expected(tmp_path, value) -> None:
    np.save(tmp_path / "s.npy", value, allow_pickle=True)
    with pytest.raises(DataError, match=r"expected numbers \[images, 2\].*a single value"):
        read_box_sizes(tmp_path / "s.npy")
