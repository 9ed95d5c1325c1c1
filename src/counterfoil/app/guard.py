"""ASGI middleware around every request: access, limits, security headers, Prometheus metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import prometheus_client as prometheus

from counterfoil.app.access import HEALTH_PATH, Access
from counterfoil.app.connections import Body, Limits, Message, Receive, client_of, too_long
from counterfoil.app.problems import RETRY_HEADERS, Problem, problem_response
from counterfoil.app.turns import Turns

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
UPLOAD = "/api/images"
ALWAYS_ANSWERED = {HEALTH_PATH, "/metrics"}
"""Paths answered even when the service is at its limits, without waiting for a turn."""

SPARE_KEY = "counterfoil.spare"
"""Key in a request's state: whether its connection is a spare one (`Connections`)."""

MULTIPART_EXTRA = 4096
"""Bytes that a form adds to the uploaded file."""

CLOSE_HEADERS = {"Connection": "close"}

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


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)

prometheus.disable_created_metrics()


class Meters:
    """Prometheus metrics of one service: requests, batches and gauges."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self._requests = prometheus.Counter(
            "counterfoil_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = prometheus.Histogram(
            "counterfoil_request_seconds",
            "Seconds until the response is complete.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self._batches = prometheus.Histogram(
            "counterfoil_batch_jobs", "Jobs per batch.", ("kind",), buckets=SIZES, registry=registry
        )

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a value that is read on every scrape."""
        gauge = prometheus.Gauge(f"counterfoil_{name}", about, registry=self.registry)
        gauge.set_function(read)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, kind: str, jobs: int) -> None:
        self._batches.labels(kind).observe(jobs)

    def text(self) -> str:
        return prometheus.generate_latest(self.registry).decode("utf-8")


class Slots:
    """The number of requests processed at once, and its limit.

    A request holds a slot from the end of its body to the start of its response, so a slow client
    never occupies one.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0


class Slot:
    """The slot of one request."""

    def __init__(self, slots: Slots, always: bool) -> None:
        self._slots, self._always, self._taken = slots, always, False

    def take(self) -> None:
        if self._slots.taken >= self._slots.most and not self._always:
            raise Problem(503, "too many requests at once; try again", RETRY_HEADERS)
        self._slots.taken += 1
        self._taken = True

    def give_back(self) -> None:
        if self._taken:
            self._slots.taken -= 1
            self._taken = False


class Guard:
    """ASGI middleware around the service."""

    def __init__(
        self, app: App, limits: Limits, meters: Meters, access: Access, turns: Turns
    ) -> None:
        self.app, self.limits, self.meters, self.access = app, limits, meters, access
        self._turns = turns
        self.slots = Slots(limits.in_flight)
        self._clients: Counter[str] = Counter()
        meters.gauge("in_flight", "Requests in progress.", lambda: self.slots.taken)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._counted(scope, receive, send)
        elif scope["type"] == "websocket" and self.access.find_problem(scope) is not None:
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
        else:
            await self.app(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it."""
        started, status = time.perf_counter(), 500
        client = client_of(scope["client"][0]) if scope.get("client") else ""
        slot = Slot(self.slots, always=scope["path"] in ALWAYS_ANSWERED)

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                slot.give_back()
                status = int(message["status"])
                message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
            await send(message)

        self._clients[client] += 1
        try:
            await self._answer(scope, receive, send_and_note, slot, client)
        finally:
            slot.give_back()
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", "other")
            self.meters.request(method, route, status, time.perf_counter() - started)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, slot: Slot, client: str
    ) -> None:
        most, seconds = self._most(scope), self.limits.body_timeout
        body = Body(receive, most, seconds, slot.take, empty=_is_empty(scope))
        problem = self._find_problem(scope, client)
        if problem is None:
            try:
                if not self._streams(scope) and not await body.read():
                    return  # the client is gone
            except Problem as error:
                problem = error
        if problem is None:
            problem = await self._pass_on(scope, body, send)
        if problem is not None:
            if problem.status == 413:
                await body.discard()
            await _refuse(problem, scope, receive, send)

    async def _pass_on(self, scope: Scope, body: Body, send: Send) -> Problem | None:
        """Let the application answer; the problem if the body failed before the response began."""
        begun = False

        async def send_on(message: Message) -> None:
            nonlocal begun
            if body.problem is None or begun:
                begun = True
                await send(message)

        if scope["path"] not in ALWAYS_ANSWERED:
            await self._turns.take()
        await self.app(scope, body.receive, send_on)
        return None if begun else body.problem

    def _find_problem(self, scope: Scope, client: str) -> Problem | None:
        """Why a request is refused on account of its headers; None if it is not."""
        if scope.get("state", {}).get(SPARE_KEY) and scope["path"] not in ALWAYS_ANSWERED:
            return Problem(
                503, "too many connections; try again", {**RETRY_HEADERS, **CLOSE_HEADERS}
            )
        problem = self.access.find_problem(scope)
        if problem is not None:
            return problem
        most = self.limits.address_connections
        if (
            client
            and most
            and self._clients[client] > most
            and scope["path"] not in ALWAYS_ANSWERED
        ):
            return Problem(429, f"at most {most} requests at once from one address", RETRY_HEADERS)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit():
            return Problem(400, "Content-Length is not a number")
        return too_long(self._most(scope)) if int(length) > self._most(scope) else None

    def _most(self, scope: Scope) -> int:
        """The largest body in bytes."""
        if self._streams(scope):
            return self.limits.upload_bytes + MULTIPART_EXTRA
        return self.limits.json_bytes

    def _streams(self, scope: Scope) -> bool:
        """Whether the application reads the body in parts, as it does for uploads.

        Other bodies are small. They are complete before the application is called.
        """
        return scope["path"] == UPLOAD and scope["method"] == "POST"


def _is_empty(scope: Scope) -> bool:
    """Whether the headers announce no body."""
    headers = dict(scope["headers"])
    return headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(problem.headers)
    if problem.status in (408, 413):
        headers |= CLOSE_HEADERS
    await problem_response(problem.status, problem.detail, headers=headers)(scope, receive, send)
