"""The event loop answers everybody: what reads disks or pixels runs on other threads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from urllib.parse import quote

import counterfoil.app.images
import counterfoil.app.routes
from counterfoil.app.images import Library
from counterfoil.app.runs import Runs
from tests.app.conftest import LIMITS, running

HANGS = 20.0


def test_pixels_and_captions_are_not_read_on_the_thread_that_answers_everybody(
    client, photo, pairs, monkeypatch
) -> None:
    threads: list[threading.Thread] = []
    shrunk, about = counterfoil.app.images.shrunk, Library.about

    def noted(function):
        def call(*of):
            threads.append(threading.current_thread())
            return function(*of)

        return call

    monkeypatch.setattr(counterfoil.app.images, "shrunk", noted(shrunk))
    monkeypatch.setattr(Library, "about", noted(about))
    assert client.upload(photo).status == 201
    assert client.get(f"/api/image?image={quote(pairs.test.ids[0])}").status == 200
    assert len(threads) == 2
    assert not any(thread.name.endswith("(run)") for thread in threads)  # of the server


def test_between_two_texts_to_score_the_event_loop_does_other_work(
    client, pairs, monkeypatch
) -> None:
    done: list[int] = []
    iterations: list[int] = []
    unknown = counterfoil.app.routes._unknown

    def noted(model, text: str) -> list[str]:
        iterations.append(len(done))
        asyncio.get_running_loop().call_soon(done.append, 1)
        return unknown(model, text)

    monkeypatch.setattr(counterfoil.app.routes, "_unknown", noted)
    body = {"images": pairs.test.ids[:1], "texts": [pairs.test.captions[0][0]] * 5}
    assert client.post("/api/score", body).status == 200
    assert iterations == [0, 1, 2, 3, 4]


def test_health_needs_no_thread_that_a_slow_disk_keeps_busy(content, monkeypatch) -> None:
    go_on, reading = threading.Event(), []

    def listed_later(self):
        reading.append(1)
        go_on.wait(HANGS)
        return []

    monkeypatch.setattr(Runs, "listed", listed_later)
    request = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(content, LIMITS) as client, ExitStack() as stack:
        stack.callback(go_on.set)
        for _ in range(45):  # more than anyio has threads
            opened = socket.create_connection((client.host, client.port), timeout=HANGS)
            stack.enter_context(opened).sendall(request)
        until = time.monotonic() + HANGS
        while not reading:
            assert time.monotonic() < until
        assert client.get("/healthz").status == 200
        assert client.get("/static/app.js").status == 200
        assert not go_on.is_set()
