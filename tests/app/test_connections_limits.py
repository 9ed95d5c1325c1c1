"""Limits of the service: what is just within one is answered, what is just beyond is refused."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.app.connections import PAGE, RESULTS, TEXT_LETTERS, TEXT_WORDS, TEXTS, Limits
from counterfoil.app.guard import Meters
from counterfoil.app.problems import Problem
from counterfoil.app.queue import BatchQueue
from tests.app.conftest import LIMITS, running
from tests.app.test_queue import Double, Worker, held

DEFAULT = Limits()
DOCS = Path(__file__).parents[2] / "docs" / "serve.md"


def test_the_defaults_are_those_that_the_documentation_states() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for row in (
        f"| upload | {DEFAULT.upload_bytes / 2**20:g} MiB, {DEFAULT.pixels / 1e6:g} million pixels",
        f"| other bodies | {DEFAULT.json_bytes / 2**10:g} KiB |",
        f"| a sentence | {TEXT_LETTERS} letters, {TEXT_WORDS} words",
        f"| texts and images of one request; results | {TEXTS}; {RESULTS} |",
        f"| uploads kept | {DEFAULT.uploads},",
        f"| requests at once; work waiting | {DEFAULT.in_flight}; {DEFAULT.waiting} |",
        f"| the work for an answer | {DEFAULT.timeout:g} s |",
        f"| all headers of a request (`--header-timeout`) | {DEFAULT.header_timeout:g} s |",
        f"| a whole body (`--body-timeout`) | {DEFAULT.body_timeout:g} s |",
        f"| reading an answer | {DEFAULT.send_timeout:g} s |",
        f"| between two requests (`--keep-alive`) | {DEFAULT.keep_alive:g} s |",
        f"| connections (`--connections`) | {DEFAULT.connections} |",
        f"(`--address-connections`) | {DEFAULT.address_connections};",
        f"of the same kind, up to {DEFAULT.batch}.",
    ):
        assert row in text


def test_the_bytes_of_an_upload_and_of_another_body(content, photo) -> None:
    with running(content, DEFAULT) as client:
        padded = photo + bytes(DEFAULT.upload_bytes - len(photo))
        assert client.upload(padded).status == 201
        assert client.upload(padded + b"\0").status == 413
        head, end = b'{"text": "a dog"', b"}"
        body = head + b" " * (DEFAULT.json_bytes - len(head + end)) + end
        assert client.post("/api/search", body).status == 200
        assert client.post("/api/search", body[:-1] + b" }").status == 413


def encoded(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, 90, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_pixels_of_an_upload(client) -> None:
    width = 1000
    height = LIMITS.pixels // width
    assert client.upload(encoded(width, height)).status == 201
    assert client.upload(encoded(width, height + 1)).status == 413


def test_the_number_of_uploads_kept(client) -> None:
    names = [client.upload(encoded(20 + n, 20)).json["id"] for n in range(LIMITS.uploads)]
    assert client.get(f"/api/picture?image={names[0]}").status == 200
    client.upload(encoded(90, 20))
    assert client.get(f"/api/picture?image={names[0]}").status == 404
    assert client.get(f"/api/picture?image={names[1]}").status == 200


def test_the_letters_and_words_of_a_sentence(client) -> None:
    def status(text: str) -> int:
        return client.post("/api/search", {"text": text}).status

    long = "a dog " + "x" * (TEXT_LETTERS - 6)
    assert (status(long), status(f"{long}x")) == (200, 422)
    many = "a " * (TEXT_WORDS - 1)
    assert (status(f"{many}dog"), status(f"{many}dog a")) == (200, 422)


def test_the_texts_and_images_of_a_request_and_the_results(client, pairs) -> None:
    def score(images: int, texts: int) -> int:
        command = {"images": [pairs.test.ids[0]] * images, "texts": ["a dog"] * texts}
        return client.post("/api/score", command).status

    assert (score(1, TEXTS), score(1, TEXTS + 1)) == (200, 422)
    assert (score(TEXTS, 1), score(TEXTS + 1, 1)) == (200, 422)
    for path, most in (("/api/search", RESULTS), ("/api/images", PAGE)):
        result = [
            client.post(path, {"text": "a dog", "k": count}).status
            if path == "/api/search"
            else client.get(f"{path}?limit={count}").status
            for count in (most, most + 1)
        ]
        assert result == [200, 422]


def test_the_work_that_waits() -> None:
    worker, limits = Worker(), Limits(waiting=5, timeout=60.0, drain=60.0)

    async def ask() -> list[int]:
        queue = BatchQueue(worker, limits, Meters())
        first = await held(worker, queue)
        waiting = [asyncio.ensure_future(queue.submit(Double(n))) for n in range(limits.waiting)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="too much work"):
            await queue.submit(Double(99))
        worker.gate.set()
        results = await asyncio.gather(first, *waiting)
        queue.close()
        return results

    assert asyncio.run(ask()) == [0, *(2 * n for n in range(limits.waiting))]
