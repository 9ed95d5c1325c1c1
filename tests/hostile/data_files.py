"""Hostile data sets: tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.hostile.corpus import (
    MIB,
    PICTURE,
    Case,
    Content,
    Make,
    built,
    deep,
    device,
    fifo,
    file,
    files,
    gzip_bomb,
    loop,
    outside,
    sparse,
    subfolder,
)

CASES: list[Case] = []


def case(name: str, make: Make, phrase: str, error: str = "DataError", door: str = "pairs") -> None:
    CASES.append(Case(name, door, make, error, phrase))


def row(**change: object) -> str:
    good = {"image": "a.png", "split": "train", "captions": ["a dog"], "id": "a"}
    return json.dumps({**good, **change}) + "\n"


def table(name: str, content: Content) -> Make:
    return files({name: content, "a.png": PICTURE, "b.png": PICTURE})


def jsonl(content: Content) -> Make:
    return table("captions.jsonl", content)


# Tables of lines.

case("jsonl: not JSON", jsonl("{image: a.png"), "not JSON (Expecting property name")
case("jsonl: lists 100,000 deep", jsonl(deep("[")), "not JSON (maximum recursion")
case("jsonl: objects 100,000 deep", jsonl(deep('{"a":')), "not JSON (maximum recursion")
case("jsonl: no UTF-8", jsonl(b'{"image": "\xff\xfe"}'), "not UTF-8: byte 0xff at position")
case("jsonl: NUL bytes", jsonl(b"\0" * 5000), "not JSON (Expecting value: line 1")
case(
    "jsonl: a number of 100,000 digits",
    jsonl('{"image":' + "9" * 100_000 + "}"),
    "not JSON (Exceeds the limit (4300",
)
case("jsonl: a list for a row", jsonl("[1, 2]\n"), "expected an object")
case("jsonl: a number for a row", jsonl("5\n"), "expected an object")
case(
    "jsonl: an infinite caption",
    jsonl(row(captions=float("inf"))),
    "none of its 1 images can be used",
)
case(
    "jsonl: captions that are an object",
    jsonl(row(captions={"a": 1})),
    "none of its 1 images can be used",
)
case(
    "jsonl: captions nested in lists",
    jsonl(row(captions=[[["a"]]])),
    "none of its 1 images can be used",
)
case(
    "jsonl: an image that is a number",
    jsonl(row(image=5)),
    "captions.jsonl:1: expected a file",
    "skip",
)
case(
    "jsonl: half a character as split",
    jsonl(row(split="t\ud800")),
    "image 'a': 't\\ud800' cannot be the",
)
case(
    "jsonl: half a character as caption",
    jsonl(row(captions=["x \ud800"])),
    "none of its 1 images can be used",
)
case(
    "jsonl: a caption of 10 MB",
    jsonl(built(lambda: row(captions=["a " * 5 * MIB]).encode())),
    "none of its 1 images can be used",
)
case(
    "jsonl: a line of 20 MB",
    jsonl(b'{"a": "' + b"x" * 20 * MIB),
    "a line of more than 16 MiB: not a",
)
case(
    "jsonl: a path that climbs",
    jsonl(row(image="../../../../etc/passwd")),
    "leads out of the image folder",
)
case("jsonl: an absolute path", jsonl(row(image="/etc/passwd")), "leads out of the image folder")
case("jsonl: a NUL in a path", jsonl(row(image="a\0.png")), "leads out of the image folder")
case(
    "jsonl: a path of 10,000 letters",
    jsonl(row(image="a/" * 5000)),
    "none of its 1 image files exists",
)
case("jsonl: empty", jsonl(b""), "the table has no rows that can be")
case("jsonl: only line breaks", jsonl(b"\n" * MIB), "the table has no rows that can be")
case("jsonl: a FIFO", jsonl(fifo), "not a regular file but a FIFO)")
case("jsonl: a device", jsonl(device), "not a regular file but a device)")
case("jsonl: a link to itself", jsonl(loop), "Too many levels of symbolic links)")
case("jsonl: a link out of the folder", jsonl(outside), "not JSON")
case("jsonl: a folder", jsonl(subfolder), "not a known data set layout")
case("jsonl: a gzip bomb", jsonl(gzip_bomb()), "not UTF-8: byte 0x8b at position 2")
case("jsonl.gz: a gzip bomb", file("captions.jsonl.gz", gzip_bomb()), "not a known data set layout")
case("jsonl: 8 GB of zeros", jsonl(sparse(8 * 2**30)), "too large: 8 GiB, at most 4 GiB of")
case("jsonl: UTF-16", jsonl(row().encode("utf-16")), "UTF-16, not UTF-8; save it as UTF-8")
case(
    "jsonl: one id for two images",
    jsonl(row() + row(image="b.png")),
    "image 'a': the id is taken by the",
)

CSV = "image,split,caption\n"
case(
    "csv: no header that is known",
    table("captions.csv", "x,y\n1,2\n"),
    "no column of captions (captions",
)
case(
    "csv: a quote that never ends",
    table("captions.csv", CSV + '"a.png,train,' + "x" * MIB),
    'the quote (") that opens a field',
)
case(
    "csv: a row too long",
    table("captions.csv", CSV + "a.png,train,x,y,z\n"),
    "5 fields, but the header names 3",
)
case(
    "csv: a column named twice",
    table("captions.csv", "image,image,caption\na.png,b.png,x\n"),
    "names the column 'image' twice",
)
case(
    "csv: 100,000 columns",
    table("captions.csv", CSV + "," * 100_000),
    "100001 fields, but the header names",
)
case(
    "csv: 100,000 names of columns",
    table("captions.csv", ",".join(f"c{n}" for n in range(100_000)) + ",c99999\n"),
    "names the column 'c99999' twice",
)
case(
    "csv: no UTF-8",
    table("captions.csv", CSV.encode() + b"a.png,train,\xff\n"),
    "not UTF-8: byte 0xff at position",
)
case(
    "csv: a line without an end",
    table("captions.csv", sparse(2**31)),
    "a line of more than 16 MiB: not a",
)
case("csv: nothing but a header", table("captions.csv", CSV), "the table has no rows that can be")
case("tsv: a FIFO", table("captions.tsv", fifo), "not a regular file but a FIFO)")
case(
    "tsv: no UTF-8",
    table("captions.tsv", b"image\tcaption\na.png\t\xff\n"),
    "not UTF-8: byte 0xff at position 7",
)

# Parquet.


def parquet(change: Callable[[bytes], bytes]) -> Make:
    def make(folder: Path) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"image": ["a.png"], "caption": ["a dog"]}), folder / "c.parquet")
        path = folder / "captions.parquet"
        path.write_bytes(change((folder / "c.parquet").read_bytes()))
        (folder / "c.parquet").unlink()
        (folder / "a.png").write_bytes(PICTURE)
        return folder

    return make


case("parquet: text", parquet(lambda _: b"no parquet"), "not a readable Parquet file")
case("parquet: empty", parquet(lambda _: b""), "not a readable Parquet file")
case("parquet: its signature alone", parquet(lambda _: b"PAR1PAR1"), "not a readable Parquet file")
case(
    "parquet: cut in half",
    parquet(lambda data: data[: len(data) // 2]),
    "not a readable Parquet file",
)
case(
    "parquet: a footer of 4 GB",
    parquet(lambda data: data[:-8] + b"\xff\xff\xff\xffPAR1"),
    "not a readable Parquet file",
)
case(
    "parquet: a footer of nothing",
    parquet(lambda data: data[:-8] + b"\0\0\0\0PAR1"),
    "not a readable Parquet file",
)
case(
    "parquet: a footer of noise",
    parquet(lambda data: data[:40] + bytes(range(200)) * 2 + b"\x90\x01\0\0PAR1"),
    "not a readable Parquet file",
)
case(
    "parquet: pages of zeros",
    parquet(lambda data: data[:4] + bytes(60) + data[64:]),
    "not a readable Parquet file",
)
case("parquet: a FIFO", table("captions.parquet", fifo), "not a readable Parquet file ([Errno")

# JSON of published data sets.


def karpathy(content: Content) -> Make:
    return files({"dataset_x.json": content})


def karpathy_image(**change: object) -> dict:
    image = {"filename": "a.png", "split": "train", "sentences": [{"raw": "a dog"}]}
    return {"images": [{**image, **change}]}


case(
    "karpathy: cut short",
    karpathy('{"images": [{"filename": "a.p'),
    "not JSON (Unterminated string",
)
case("karpathy: lists 100,000 deep", karpathy(deep("[")), "not JSON (maximum recursion")
case("karpathy: a list", karpathy("[]"), "expected an object with a list")
case(
    "karpathy: images that are a number", karpathy({"images": 5}), "expected an object with a list"
)
case(
    "karpathy: an image that is a text",
    karpathy({"images": ["a"]}),
    "images[0]: expected an object with",
)
case("karpathy: no UTF-8", karpathy(b'{"images": "\xff"}'), "not UTF-8: byte 0xff; save the file")
case("karpathy: NaN for images", karpathy('{"images": NaN}'), "expected an object with a list")
case(
    "karpathy: sentences that are a text",
    karpathy(karpathy_image(sentences="x")),
    "images[0]: has no split or no list",
)
case(
    "karpathy: a sentence that is null",
    karpathy(karpathy_image(sentences=[None])),
    "images[0].sentences[0]: has no",
)
case(
    "karpathy: a file name that climbs",
    karpathy(karpathy_image(filename="../../etc/passwd")),
    "image 'passwd': image name",
)
case(
    "karpathy: a file name that is a list",
    karpathy(karpathy_image(filename=[1])),
    "images[0]: expected an object with",
)
case(
    "karpathy: a split that is a number",
    karpathy(karpathy_image(split=5)),
    "images[0]: has no split or no list",
)
case("karpathy: 9 GB of zeros", karpathy(sparse(9 * 2**30)), "too large: 9 GiB, at most 1 GiB of")
case("karpathy: a FIFO", karpathy(fifo), "not a regular file but a FIFO)")


def coco(content: Content) -> Make:
    return files({"captions_train2017.json": content})


COCO = {"images": [{"id": 1, "file_name": "a.png"}]}
case("coco: cut short", coco('{"images": [{"id": 1'), "not JSON (Expecting ',' delimiter")
case("coco: no annotations", coco(COCO), "expected an object with lists")
case(
    "coco: an annotation of no image",
    coco({**COCO, "annotations": [{"image_id": 9, "caption": "x"}]}),
    "annotations[0]: no image has the id",
)
case(
    "coco: an id that is a list",
    coco({"images": [{"id": [], "file_name": "a"}], "annotations": []}),
    "none of its 1 images can be used",
)
case(
    "coco: ids given twice",
    coco({"images": COCO["images"] * 2, "annotations": []}),
    "image '1' (a.png): the id is taken",
)
case(
    "coco: a caption that is a number",
    coco({**COCO, "annotations": [{"image_id": 1, "caption": 5}]}),
    "annotations[0]: expected an object",
)
case(
    "coco: an infinite id",
    coco('{"images": [{"id": 1e999, "file_name": "a.png"}], "annotations": []}'),
    "none of its 1 images can be used",
)
case(
    "coco: annotations that are an object",
    coco({**COCO, "annotations": {"a": 1}}),
    "expected an object with lists",
)

flickr = "Flickr8k.token.txt"
case("flickr8k: no tabs", files({flickr: "a dog\n" * 9}), "expected")
case(
    "flickr8k: no UTF-8", files({flickr: b"a.jpg#0\t\xff\n"}), "not UTF-8: byte 0xff at position 9"
)
case("flickr8k: a number that is none", files({flickr: "a.jpg#x\ta dog\n"}), "expected")
case("flickr8k: NUL bytes", files({flickr: b"\0" * 5000}), "expected")
