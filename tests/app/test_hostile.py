"""Hostile uploads and inputs, each with its clean answer: a problem, never a crash."""

from __future__ import annotations

import io
import json
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.app.conftest import LIMITS, Client, running


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A few bytes that say they are a picture of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


SMALL = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8))
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
FRAMES = [SMALL.rotate(9 * turn) for turn in range(60)]

UPLOADS: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 422),
    "text": (b"just some words", 415),
    "zeros": (bytes(5000), 415),
    "a page with a script": (b"<html><script>alert(1)</script></html>", 415),
    "an SVG that names a file": (SVG, 415),
    "PostScript, which Pillow would run": (EPS, 415),
    "a zip": (b"PK\x03\x04" + bytes(100), 415),
    "a signature and no more": (b"\x89PNG\r\n\x1a\n", 415),
    "a PNG cut short": (encoded(SMALL)[:-200], 422),
    "a JPEG cut short": (encoded(SMALL, "JPEG")[:300], 422),
    "a PNG with bytes changed": (encoded(SMALL)[:60] + b"\xff" * 400 + encoded(SMALL)[460:], 422),
    "a bomb of 2.5 billion pixels": (png_that_claims(50_000, 50_000), 413),
    "a bomb below Pillow's own limit": (png_that_claims(2000, 1500), 413),
    "a side without end": (png_that_claims(2**31 - 1, 1), 413),
    "no height": (png_that_claims(5, 0), 415),
    "more bytes than allowed": (encoded(SMALL) + bytes(LIMITS.upload_bytes), 413),
    "one pixel": (encoded(Image.new("RGB", (1, 1))), 201),
    "a line": (encoded(Image.new("RGB", (1500, 1))), 201),
    "many frames": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), 201),
    "sixteen bits": (encoded(Image.fromarray(np.full((9, 9), 40000, dtype=np.uint16))), 201),
    "CMYK": (encoded(SMALL.convert("CMYK"), "JPEG"), 201),
    "all transparent": (encoded(Image.new("RGBA", (20, 20), (9, 9, 9, 0))), 201),
    "a palette": (encoded(SMALL.convert("P")), 201),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_has_a_clean_answer(client, name) -> None:
    data, status = UPLOADS[name]
    answer = client.upload(data, name="../../etc/passwd")
    assert answer.status == status, answer.body
    if status == 201:
        command = {"image": answer.json["id"], "text": "a dog"}
        assert client.post("/api/explain", command).status == 200
    else:
        is_a_problem(answer)


def is_a_problem(answer) -> None:
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json["detail"]
    for secret in ("Traceback", "site-packages", "/root", "/home"):
        assert secret not in answer.body.decode()


def explain(text: object) -> Callable[[Client, str], object]:
    return lambda client, image: client.post("/api/explain", {"image": image, "text": text})


def search_image(name: object) -> Callable[[Client, str], object]:
    return lambda client, _: client.post("/api/search", {"image": name})


def raw(path: str, body: bytes) -> Callable[[Client, str], object]:
    return lambda client, _: client.post(path, body)


def get(path: str) -> Callable[[Client, str], object]:
    return lambda client, _: client.get(path)


INPUTS: dict[str, tuple[Callable[[Client, str], object], set[int]]] = {
    "a path as image": (search_image("/etc/passwd"), {404}),
    "a path that climbs": (search_image("../../../../etc/passwd"), {404}),
    "an address as image": (search_image("http://127.0.0.1:1/x.png"), {404}),
    "a file address": (search_image("file:///etc/passwd"), {404}),
    "a NUL in a name": (search_image("scene\x00.png"), {422}),
    "a name without end": (search_image("a" * 5000), {422}),
    "a picture by its path": (get("/api/picture?image=/etc/passwd"), {404}),
    "bytes that are no letters": (get("/api/picture?image=%ff%fe"), {404}),
    "a run that climbs": (get("/api/run?name=../../etc"), {404}),
    "a static file that climbs": (get("/static/../../../../../etc/passwd"), {404}),
    "the same, encoded": (get("/static/%2e%2e/%2e%2e/service.py"), {404}),
    "the code of the service": (get("/static/../service.py"), {404}),
    "no words": (explain(" \t\n "), {422}),
    "an empty text": (explain(""), {422}),
    "a text of 10,000 letters": (explain("a dog " * 1700), {422}),
    "300 words of one letter": (explain("a " * 299), {422}),
    "half of a letter": (raw("/api/search", b'{"text": "dog \\ud83d"}'), {422}),
    "control characters": (explain("a \x00 dog \x1b[2J"), {422}),
    "letters of every kind": (explain("İstanbul ﷺ 𝔘𝔫𝔦 👩‍👩‍👧 Z̷̢a̶l̸g̶o͜ ½ ß"), {200}),
    "right to left and back": (explain("\u202eevil\u202c dog \u200b"), {200, 422}),
    "a script": (explain("<script>alert(1)</script> a"), {200, 422}),
    "a number as text": (explain(7), {422}),
    "a list as text": (explain(["a"]), {422}),
    "not JSON": (raw("/api/search", b"{text: dog"), {422}),
    "JSON 100,000 deep": (raw("/api/search", b"[" * 100_000), {422}),
    "a number with 5,000 digits": (raw("/api/search", b'{"k":%s}' % (b"9" * 5000)), {422}),
    "not a number": (raw("/api/correct", b'{"image":"x","text":"a","threshold":NaN}'), {422}),
    "no UTF-8": (raw("/api/search", b'{"text":"\xff\xfe"}'), {422}),
    "a body of a megabyte": (raw("/api/search", b'{"text":"' + b"a" * 2**20 + b'"}'), {413}),
    "more results than there may be": (raw("/api/search", b'{"text":"a","k":100000}'), {422}),
    "fewer than none": (get("/api/images?offset=-1"), {422}),
    "5,000 texts at once": (
        raw("/api/score", json.dumps({"images": ["a"], "texts": ["a"] * 5000}).encode()),
        {422},
    ),
    "an upload without a file": (raw("/api/images", b"{}"), {422}),
}  # fmt: skip


def test_there_are_more_than_thirty() -> None:
    assert len(UPLOADS) + len(INPUTS) > 50


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_has_a_clean_answer(client, pairs, name) -> None:
    ask, statuses = INPUTS[name]
    answer = ask(client, pairs.test.ids[0])
    assert answer.status in statuses, answer.body
    if answer.status >= 400:
        is_a_problem(answer)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"{text: dog", "not JSON (at character 1)"),
        (b"[" * 100_000, "JSON that is nested too deeply"),
        (b'{"text":"\xff"}', "not JSON in UTF-8 (at byte 9)"),
        (b'{"k":%s}' % (b"9" * 5000), "JSON with a number that is too long"),
    ],
)
def test_a_body_that_cannot_be_read_as_json_is_explained(client, body, what) -> None:
    answer = client.post("/api/search", body)
    assert (answer.status, answer.json["detail"]) == (422, f"body: {what}")
    assert answer.json["errors"] == [{"where": "body", "what": what}]


def test_a_text_instead_of_an_uploaded_file_is_explained(client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.ask("POST", "/api/images", b"file=photo.jpg", form)
    assert answer.status == 422
    assert answer.json["detail"] == (
        "body.file: expected a file, got text (with curl: -F file=@photo.jpg)"
    )


def spoken(client: Client, data: bytes) -> bytes:
    """The head of what the service answers to bytes on a bare connection."""
    with socket.create_connection((client.host, client.port), timeout=60) as connection:
        connection.sendall(data)
        heard = b""
        while b"\r\n\r\n" not in heard:
            part = connection.recv(65536)
            assert part, heard
            heard += part
        return heard


def test_a_body_that_never_ends_is_cut_off(content) -> None:
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with running(content, replace(LIMITS, body_timeout=3.0)) as client:
        said = spoken(client, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 6)
    assert said.startswith(b"HTTP/1.1 413")


def test_a_body_that_never_comes_is_not_waited_for(content) -> None:
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(content, replace(LIMITS, body_timeout=0.3)) as client:
        said = spoken(client, head + b'Content-Length: 50\r\n\r\n{"text": ')
        assert said.startswith(b"HTTP/1.1 408")
        assert client.get("/healthz").status == 200
