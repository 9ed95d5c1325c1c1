"""Slow, idle and silent clients: each is cut off in time, and none keeps others from answers."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from counterfoil.app.connections import Limits
from counterfoil.app.engine import Engine
from counterfoil.app.queue import BatchQueue
from tests.app.conftest import Client, running

SEARCH = {"text": "a red car next to a tree", "k": 3}
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: 50000\r\n\r\n"
HANGS = 60.0
"""Seconds after which a test fails; nothing should take a tenth of it."""

TRIES = 8
"""Of a client that a busy machine may pause for longer than `QUICK` waits."""

QUICK = Limits(header_timeout=0.3, body_timeout=0.3, keep_alive=0.3, timeout=0.3, send_timeout=0.3)


@pytest.fixture(scope="module")
def quick(content) -> Iterator[Client]:
    with running(content, QUICK) as client:
        yield client


def connected(client: Client, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    opened = socket.create_connection((client.host, client.port), HANGS, (source, 0))
    opened.sendall(data)
    return opened


@contextmanager
def many(client: Client, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send some bytes and then nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(connected(client, data)) for _ in range(count)]


def heard_while_trickling(connection: socket.socket) -> bytes:
    """What is answered to a client that sends a byte at a time until it is cut off."""
    heard, until = b"", time.monotonic() + HANGS
    connection.settimeout(0.1)
    while time.monotonic() < until:
        try:
            connection.send(b"a")
            part = connection.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return heard
        if not part:
            return heard
        heard += part
    raise AssertionError(f"never cut off; heard {heard!r}")


def heard_until_closed(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def heard_with(
    status: bytes, client: Client, sent: bytes, listen: Callable[[socket.socket], bytes]
) -> bytes:
    """What is answered to ``sent``, at the first of several tries that gets this status."""
    heard = b""
    for _ in range(TRIES):
        with suppress(ConnectionError), connected(client, sent) as connection:
            heard = listen(connection)
        if heard.startswith(b"HTTP/1.1 " + status):
            return heard
    raise AssertionError(f"expected {status!r}, heard {heard!r}")


def heard_until(connection: socket.socket, end: bytes) -> bytes:
    heard = b""
    while not heard.endswith(end):
        part = connection.recv(65536)
        assert part, heard
        heard += part
    return heard


def gauge(client: Client, name: str) -> int:
    text = client.get("/metrics").body.decode()
    result = re.search(rf"^counterfoil_{name} (\d+)\.0$", text, re.M)
    assert result is not None
    return int(result[1])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (GET + b"X-Slow: ", b"408"),
        (b"GE", b"408"),
        (GET + b"\r\n" + b"GET / HTTP/1.1\r\nX-Slow: ", b"200"),
        (POST + LENGTH, b"408"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n10000\r\n", b"408"),
        (b"POST /api/images HTTP/1.1\r\nHost: localhost\r\n"
         b"Content-Type: multipart/form-data; boundary=x\r\n" + LENGTH +
         b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n", b"408"),
        (b"POST / HTTP/1.1\r\nHost: evil.example\r\n" + LENGTH, b"421"),
    ],
    ids=["headers", "first line", "second request", "body", "chunk", "upload", "refused body"],
)  # fmt: skip
def test_a_request_that_trickles_in_is_cut_off_however_many_bytes_come(quick, sent, status) -> None:
    heard = heard_with(status, quick, sent, heard_while_trickling)
    if status != b"200":
        assert b"application/problem+json" in heard


def test_a_connection_that_says_nothing_is_closed(quick) -> None:
    with connected(quick) as connection:
        assert connection.recv(1) == b""


def test_a_connection_between_requests_is_closed_after_a_while(quick) -> None:
    heard_with(b"200", quick, GET + b"\r\n", heard_until_closed)


def test_slow_bodies_take_no_slots_from_searches(content) -> None:
    with (
        running(content, Limits(in_flight=4)) as client,
        many(client, 12, POST + b'Content-Length: 99\r\n\r\n{"text": '),
        many(client, 12, b"GET /api/picture HTTP/1.1\r\nHost: localhost\r\n" + LENGTH + b"a"),
    ):
        assert [client.post("/api/search", SEARCH).status for _ in range(5)] == [200] * 5


def test_a_client_that_does_not_read_its_answers_is_cut_off(content) -> None:
    request = b"GET /static/views.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        running(content, Limits(send_timeout=0.5, timeout=2.0)) as client,
        connected(client) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.3)
        with suppress(TimeoutError, ConnectionError):
            connection.sendall(request * 2000)
        until = time.monotonic() + HANGS
        while gauge(client, "connections") > 1:  # the one that asks is the other
            assert time.monotonic() < until
            time.sleep(0.1)


def test_idle_connections_up_to_the_cap_keep_nobody_out(content) -> None:
    limits = Limits(connections=20, address_connections=0, header_timeout=60)
    with running(content, limits) as client, many(client, 60):
        assert client.get("/healthz").status == 200
        assert client.post("/api/search", SEARCH).status == 200
        assert gauge(client, "connections") <= 20


def test_slow_connections_of_one_address_cost_that_address_alone(content) -> None:
    limits = Limits(connections=16, address_connections=6, header_timeout=60)
    with running(content, limits) as client:
        try:
            other = connected(client, GET + b"\r\n", source="127.0.0.2")
        except OSError:
            pytest.skip("this system has one loopback address")
        with other, many(client, 40, GET):
            assert b'"ok"' in heard_until(other, b"}")
            other.sendall(GET + b"\r\n")
            assert b'"ok"' in heard_until(other, b"}")
            assert gauge(client, "connections") <= 7


def test_health_is_answered_while_every_connection_waits_for_an_answer(
    content, monkeypatch
) -> None:
    go_on, run, submit, submitted = threading.Event(), Engine.run, BatchQueue.submit, []

    def run_later(self, jobs):
        go_on.wait(HANGS)
        return run(self, jobs)

    def submit_and_note(self, work):
        submitted.append(work)
        return submit(self, work)

    monkeypatch.setattr(Engine, "run", run_later)
    monkeypatch.setattr(BatchQueue, "submit", submit_and_note)
    body = b'{"text": "two cows"}'
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    limits = Limits(connections=3, address_connections=3, spare_connections=2)
    with running(content, limits) as client, many(client, 3, request) as busy:
        until = time.monotonic() + HANGS
        while len(submitted) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        with many(client, 5):  # idle ones do not keep the spare places
            assert client.get("/healthz").status == 200
            refused = client.get("/api/about")
            assert (refused.status, refused.headers["connection"]) == (503, "close")
        go_on.set()
        for connection in busy:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
