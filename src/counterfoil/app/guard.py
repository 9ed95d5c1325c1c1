"""What stands before every request: limits, host check, headers, counting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from typing import Any

from counterfoil.app.limits import Limits
from counterfoil.app.meters import Meters
from counterfoil.app.problems import Problem, problem_response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
MULTIPART_EXTRA = 4096
"""Bytes that a form adds to the file in it."""

THROWN_AWAY = 64 * 2**20
"""Bytes of a body that is too long that are still taken, and forgotten: a client that cannot send
on does not listen to why."""

HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        b"connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guard:
    """An ASGI layer around the service.

    ``hosts`` are the names by which the service may be called; None allows any. A service on this
    machine alone is thereby out of reach for other sites that make a browser ask for it.
    """

    def __init__(
        self, app: App, limits: Limits, meters: Meters, hosts: Collection[str] | None = None
    ) -> None:
        self.app, self.limits, self.meters = app, limits, meters
        self.hosts = None if hosts is None else frozenset(hosts)
        self.in_flight = 0
        meters.gauges["counterfoil_in_flight"] = (
            "Requests being answered.",
            lambda: self.in_flight,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
            await send(message)

        self.in_flight += 1
        try:
            problem = self._refusal(scope)
            if problem is not None:
                if problem.status == 413:
                    await _throw_away(receive, self.limits.body_timeout)
                answer = problem_response(problem.status, problem.detail, headers=problem.headers)
                await answer(scope, receive, send_and_note)
            else:
                await self._answer(scope, receive, send_and_note)
        finally:
            self.in_flight -= 1
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", "other")
            self.meters.request(method, route, status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._most(scope), self.limits.body_timeout)
        refused = begun = False

        async def send_on(message: Message) -> None:
            """Pass an answer on, unless the body was cut off: then that is the answer."""
            nonlocal refused, begun
            if body.problem is None or begun:
                begun = True
                await send(message)
            elif not refused:
                refused = True
                if body.problem.status == 413:
                    await _throw_away(receive, self.limits.body_timeout)
                close = {"Connection": "close"}
                answer = problem_response(body.problem.status, body.problem.detail, headers=close)
                await answer(scope, receive, send)

        await self.app(scope, body.receive, send_on)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = dict(scope["headers"])
        if self.hosts is not None and _host(headers.get(b"host", b"")) not in self.hosts:
            return Problem(421, "the service is not known by this name")
        if self.in_flight > self.limits.in_flight and scope["path"] not in ("/healthz", "/metrics"):
            return Problem(503, "too many requests at once; try again", {"Retry-After": "1"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return Problem(400, "Content-Length is not a number")
        if int(length) > self._most(scope):
            return Problem(413, _too_long(self._most(scope)), {"Connection": "close"})
        return None

    def _most(self, scope: Scope) -> int:
        if scope["path"] == "/api/images":
            return self.limits.upload_bytes + MULTIPART_EXTRA
        return self.limits.json_bytes


class _Body:
    """The body of a request, cut off where it is too long or comes too slowly."""

    def __init__(self, receive: Receive, most: int, seconds: float) -> None:
        self._receive, self._most, self._seconds = receive, most, seconds
        self._read, self._whole = 0, False
        self.problem: Problem | None = None

    async def receive(self) -> Message:
        if self._whole:  # from here on it only waits for the client to go away
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._seconds)
        except asyncio.TimeoutError:
            self.problem = Problem(408, "the body of the request did not come in time")
            raise self.problem from None
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._read > self._most:
                self.problem = Problem(413, _too_long(self._most))
                raise self.problem
        return message


async def _throw_away(receive: Receive, seconds: float) -> None:
    """Take the rest of a body, up to a limit and for a while."""

    async def take() -> None:
        taken = 0
        while taken < THROWN_AWAY:
            message = await receive()
            taken += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(take(), seconds)


def _host(header: bytes) -> str:
    """The name in a Host header without its port.

    >>> _host(b"localhost:8000"), _host(b"[::1]:8000"), _host(b"127.0.0.1")
    ('localhost', '[::1]', '127.0.0.1')
    """
    text = header.decode("latin-1").lower()
    name, _, port = text.rpartition(":")
    return name if name and port.isdigit() else text


def _too_long(most: int) -> str:
    size = f"{most // 2**20} MiB" if most >= 2**20 else f"{most // 2**10} KiB"
    return f"the request is too long: at most {size} are read"
