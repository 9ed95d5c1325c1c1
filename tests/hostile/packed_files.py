"""Hostile arrays, archives and pictures."""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.data.hostile import BOMBS, forged_pointer, marker_call, write_hostile_scan
from tests.data.tiny import write_scan
from tests.hostile.corpus import (
    MIB,
    PICTURE,
    QUICKLY,
    Case,
    Content,
    Make,
    array,
    built,
    chunk,
    deep,
    device,
    fifo,
    file,
    files,
    gzip_bomb,
    loop,
    npy,
    png_of,
    sparse,
    subfolder,
)

CASES: list[Case] = []


def case(name: str, make: Make, phrase: str, error: str = "DataError", door: str = "pairs") -> None:
    CASES.append(Case(name, door, make, error, phrase))


# Arrays of features.


def scan(name: str, content: Content) -> Make:
    def make(folder: Path) -> Path:
        write_scan(folder, "train", 3)
        (folder / name).unlink(missing_ok=True)
        return files({name: content})(folder)

    return make


def scan_array(content: Content) -> Make:
    return scan("train_ims.npy", content)


SHAPES = {
    "negative": ("(-1, 3, 4)", "impossible shape (-1, 3, 4)"),
    "4 exabytes": (f"({2**60},)", "truncated: 192 bytes, but its"),
    "more than an integer": (f"({10**30},)", "impossible shape"),
    "70 axes": ("(" + "1, " * 70 + ")", "impossible shape of 70 axes"),
    "rows without numbers": (f"({10**15}, 0)", "the shape (1000000000000000, 0) has"),
    "one number": ("()", "holds a single number, expected rows"),
    "a text": ("'abc'", "not a readable .npy file (shape is"),
    "nested": ("((1,),)", "not a readable .npy file (shape is"),
    "a call": ("__import__('os')", "malformed node or string"),
}
for name, (shape, phrase) in SHAPES.items():
    case(f"npy: a shape that is {name}", scan_array(npy(shape)), phrase)
TYPES = {
    "objects": ("'|O'", "holds Python objects, which are not"),
    "records": ("[('a', '<f4')]", "holds [('a', '<f4')], expected"),
    "nothing wide": ("'|V0'", "holds |V0, expected plain numbers"),
    "no type": ("'x'", "not a readable .npy file (descr is"),
    "a subarray of a billion": ("('<f4', (1000000000,))", "not a readable .npy file (invalid"),
    "texts": ("'<U9'", "truncated: 192 bytes, but its"),
    "a number": ("7", "not a readable .npy file (descr is"),
}
for name, (dtype, phrase) in TYPES.items():
    case(f"npy: a type of {name}", scan_array(npy("(3, 4)", dtype)), phrase)
case("npy: its signature alone", scan_array(b"\x93NUMPY"), "not a readable .npy file (EOF")
case("npy: version 9", scan_array(npy("(3, 4)", version=9)), "version 9.0, expected 1.0, 2.0 or")
case(
    "npy: a header of 4 GB",
    scan_array(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"),
    "a header of 4,294,967,295 bytes",
)
case(
    "npy: a header 60,000 levels deep",
    scan_array(b"\x93NUMPY\x01\x00\x60\xea" + b"(" * 60_000),
    "a header of 60,000 bytes",
)
case(
    "npy: cut in a row",
    scan_array(array(np.ones((3, 3, 4), np.float32))[:-9]),
    "truncated: 263 bytes, but its",
)
case("npy: empty", scan_array(b""), "not a readable .npy file (EOF")
case("npy: a zip", scan_array(b"PK\x03\x04" + bytes(99)), "not a readable .npy file (the magic")
case("npy: a FIFO", scan_array(fifo), "not a regular file but a FIFO)")
case("npy: a device", scan_array(device), "not a regular file but a device)")
case(
    "npy: Fortran order",
    scan_array(array(np.asfortranarray(np.ones((3, 3, 4), np.float32)))),
    "stored in Fortran order; save it",
)
case(
    "npy: more rows than captions have images",
    scan_array(array(np.ones((7, 3, 4), np.float32))),
    "15 captions for 7 images: expected",
)
case(
    "npy: complex numbers",
    scan_array(array(np.ones((3, 3, 4), np.complex64))),
    "expected float features, found",
)
case(
    "npy: NaN",
    scan_array(array(np.full((3, 3, 4), np.nan, np.float32))),
    "split 'dev' has no readable image",
    door="training",
)
case(
    "npy: infinite",
    scan_array(array(np.full((3, 3, 4), np.inf, np.float32))),
    "split 'dev' has no readable image",
    door="training",
)
case(
    "npy: beyond single precision",
    scan_array(array(np.full((3, 3, 4), 1e300))),
    "split 'dev' has no readable image",
    door="training",
)
case(
    "scan: captions of NUL bytes",
    scan("train_caps.txt", b"\0" * 5000),
    "1 captions for 3 images: expected",
)
case(
    "scan: captions of 32 GB",
    scan("train_caps.txt", sparse(2**35)),
    "too large: 32 GiB, at most 4 GiB of",
)
case(
    "scan: ids that are a device", scan("train_ids.txt", device), "not a regular file but a device)"
)


def pickled(data: Callable[[Path], bytes]) -> Make:
    def make(folder: Path) -> Path:
        write_hostile_scan(folder, data(folder))
        return folder

    return make


case(
    "scan: sizes that point into memory",
    pickled(lambda _: forged_pointer()),
    "refused: it holds Python objects in",
)
case(
    "scan: sizes that call",
    pickled(lambda folder: marker_call(folder / "marker")),
    "refused: it wants to call",
)
SIZES = {
    "shared lists": "refused: shared containers unfold",
    "keys with one hash": "refused: a dictionary key or an",
    "a string of four gigabytes": "not a readable array of image sizes",
}
for name, phrase in SIZES.items():
    bomb = b"\x80\x02" + BOMBS[name]
    case(f"scan: sizes of {name}", pickled(lambda _, bomb=bomb: bomb), phrase)

# Archives.


def tar(*members: tuple[str, bytes | str, bytes]) -> bytes:
    """Members as (name, data or the target of a link, type)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if isinstance(data, str):
                info.linkname, data = data, b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def shard(content: Content) -> Make:
    return files({"train-0.tar": content})


REG, SYM, LNK, CHR, FIFO_ = (
    tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE
)  # fmt: skip
RECORD = ("a.json", b'{"captions": ["a dog"]}', REG)
ROW = ("a.png", PICTURE, REG)
HUGE = tarfile.TarInfo("a.png")
HUGE.size = 2**50
case("tar: text", shard(b"no tar" * 200), "not a whole tar archive (invalid")
case("tar: empty", shard(b""), "not a whole tar archive (empty file)")
case("tar: cut in a member", shard(tar(RECORD, ROW)[:1600]), "ends inside a.png")
case(
    "tar: a member of a petabyte",
    shard(HUGE.tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
    "ends inside a.png",
)
case(
    "tar: a link out of it", shard(tar(RECORD, ("a.png", "/etc/passwd", SYM))), "not-a-file", "skip"
)
case(
    "tar: a hard link out of it",
    shard(tar(RECORD, ("a.png", "../../etc/passwd", LNK))),
    "not-a-file",
    "skip",
)
case("tar: a device", shard(tar(RECORD, ("a.png", b"", CHR))), "not-a-file", "skip")
case("tar: a FIFO in it", shard(tar(RECORD, ("a.png", b"", FIFO_))), "not-a-file", "skip")
case(
    "tar: a name that climbs",
    shard(tar(("../../a.json", RECORD[1], REG), ("../../a.png", PICTURE, REG))),
    "../../a.json: the name leads out of",
)
case(
    "tar: an absolute name",
    shard(tar(("/etc/a.json", RECORD[1], REG), ("/etc/a.png", b"x", REG))),
    "/etc/a.json: the name leads out of",
)
case("tar: one name twice", shard(tar(RECORD, ROW, ROW)), "a.png: the shard has it twice")
case(
    "tar: a record that is no JSON",
    shard(tar(("a.json", b"{", REG), ROW)),
    "a.json:1: not JSON (Expecting",
)
case(
    "tar: a record 100,000 deep",
    shard(tar(("a.json", deep("[").encode(), REG), ROW)),
    "a.json:1: not JSON (maximum",
)
case(
    "tar: a record of numbers", shard(tar(("a.json", b"5", REG), ROW)), "a.json: expected an object"
)
case(
    "tar: a record that is no UTF-8",
    shard(tar(("a.json", b'"\xff"', REG), ROW)),
    "a.json:1: not UTF-8: byte 0xff",
)
case(
    "tar: fragments of 4 exabytes",
    shard(tar(RECORD, ("a.fragments.npy", npy(f"({2**60},)"), REG))),
    "a.fragments.npy: 192 bytes, its",
)
case(
    "tar: fragments of objects",
    shard(tar(RECORD, ("a.fragments.npy", npy("(4,)", "'|O'"), REG))),
    "a.fragments.npy: holds Python",
)
case("tar: no record", shard(tar(ROW)), "none of its 1 images can be used")
case(
    "tar: a checksum that is wrong",
    shard(b"x" + tar(RECORD, ROW)[1:]),
    "not a whole tar archive (bad",
)
case("tar: a gzip bomb", shard(gzip_bomb()), "compressed with gzip; members of")
case("tar.gz: a gzip bomb", file("train-0.tar.gz", gzip_bomb()), "compressed with gzip; members of")
case("tar: a FIFO", shard(fifo), "not a regular file but a FIFO)")


def zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=QUICKLY) as archive:
        archive.writestr("captions.jsonl", bytes(64 * MIB))
    return buffer.getvalue()


case(
    "zip: a bomb as a data set",
    file("captions.zip", built(zip_bomb)),
    "not a known data set layout",
)
case("a data set that is a FIFO", file("data", fifo), "not a regular file or folder but a")
case("a data set that is a device", file("data", device), "not a regular file or folder but a")
case(
    "a data set that is a link to itself", file("data", loop), "no such file or folder, nor a data"
)
case("an empty folder", files({}), "not a known data set layout (the")

# Pictures, scored by a model.


def picture(name: str, content: Content, phrase: str, error: str = "DataError") -> None:
    case(f"picture: {name}", file("a.png", content), phrase, error, door="picture")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
picture("empty", b"", "a.png: the file is empty")
picture("text", b"just some words", "a.png: not an image of a known")
picture("an SVG that names a file", SVG, "a.png: not an image of a known")
picture("PostScript", EPS, "a.png: not an image of a known")
picture("its signature alone", b"\x89PNG\r\n\x1a\n", "a.png: not an image of a known")
picture("a PNG cut short", PICTURE[:-30], "a.png: not a readable image (image")
picture("a bomb of 4 gigapixels", png_of(65_000, 65_000), "a.png: refused, images of this kind")
picture("a side without end", png_of(2**31 - 1, 1), "a.png: refused, images of this kind")
picture("no height", png_of(5, 0), "a.png: not an image of a known")
picture(
    "a compressed text of 64 MB",
    built(
        lambda: png_of(4, 4, 4, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 * MIB), QUICKLY)))
    ),
    "a.png: not a readable image",
)
picture("a JPEG cut in its header", b"\xff\xd8\xff\xe0\x00\x10JFIF", "a.png: not a readable image")
picture(
    "a JPEG of 65,535 squared",
    b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xda",
    "a.png: not an image of a known",
)
picture(
    "a GIF of 65,535 squared",
    b"GIF89a\xff\xff\xff\xff\x80\x00\x00" + bytes(6) + b",",
    "a.png: not an image of a known",
)
picture(
    "a BMP of negative width",
    b"BM"
    + bytes(8)
    + b"\x36\0\0\0\x28\0\0\0"
    + b"\xff\xff\xff\xff" * 2
    + b"\x01\0\x18\0"
    + bytes(24),
    "a.png: refused, images of this kind",
)
picture(
    "a TIFF that points at itself",
    b"II*\0\x08\0\0\0\x01\0\x00\x01\x03\0\x01\0\0\0\x08\0\0\0\x08\0\0\0",
    "a.png: not an image of a known",
)
picture(
    "a WebP without a body", b"RIFF\xff\xff\xff\xffWEBPVP8 ", "a.png: not a readable image (could"
)
picture(
    "an ICO of 65,535 pictures",
    b"\0\0\x01\0\xff\xff" + bytes(160),
    "a.png: not an image of a known",
)
picture("a FIFO", fifo, "not a regular file but a FIFO)")
picture("a device", device, "not a regular file but a device)")
picture("a folder", subfolder, "is a folder, expected a file)")
picture("64 GB of zeros", sparse(2**36), "too large: 64 GiB, at most 256 MiB")
