"""The guard: health checks do not wait for requests that came before them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from counterfoil.app.access import Access
from counterfoil.app.connections import Limits, Message, Receive
from counterfoil.app.guard import Guard, Meters, Scope, Send
from counterfoil.app.turns import Turns


class Guarded:
    """A guard around an application that notes the paths of its requests."""

    def __init__(self, limits: Limits | None = None) -> None:
        access = Access.to("127.0.0.1")
        self.guard = Guard(self.app, limits or Limits(), Meters(), access, Turns())
        self.paths: list[str] = []
        self.statuses: list[int] = []

    async def app(self, scope: Scope, _: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, path: str, *headers: tuple[bytes, bytes], complete: bool = True) -> None:
        async def receive() -> Message:
            if not complete:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])

        scope = {"type": "http", "method": "GET", "path": path, "client": ("127.0.0.1", 1)}
        scope["headers"] = [(b"host", b"localhost"), *headers]
        await self.guard(scope, receive, send)


def test_a_health_check_overtakes_requests_that_came_together() -> None:
    async def run() -> Sequence[str]:
        guarded = Guarded()
        paths = ["/api/runs"] * 50 + ["/healthz", "/metrics"]
        await asyncio.gather(*map(guarded.ask, paths))
        assert guarded.statuses == [200] * 52
        return guarded.paths

    paths = asyncio.run(run())
    assert len(paths) == 52
    assert paths.index("/healthz") < 5
    assert paths.index("/metrics") < 5


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_a_request_without_a_body_is_passed_on_in_the_same_iteration(headers) -> None:
    async def run() -> None:
        guarded = Guarded()
        task = asyncio.create_task(guarded.ask("/healthz", *headers))
        await asyncio.sleep(0)
        assert guarded.paths == ["/healthz"]
        await task

    asyncio.run(run())


@pytest.mark.parametrize("header", [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")])
def test_a_body_that_is_announced_and_does_not_come_is_not_awaited_for_ever(header) -> None:
    async def run() -> None:
        guarded = Guarded(Limits(body_timeout=0.01))
        await asyncio.wait_for(guarded.ask("/healthz", header, complete=False), 60)
        assert (guarded.paths, guarded.statuses) == ([], [408])

    asyncio.run(run())
