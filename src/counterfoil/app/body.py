"""The body of a request, received within a size and a total time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from counterfoil.app.problems import Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

THROWN_AWAY = 64 * 2**20
"""Bytes of a body that is too long that are still taken, and forgotten: a client that cannot send
on does not listen to why."""


class Body:
    """What a client sends after the headers.

    ``on_complete`` is called once, when the last of it is there; it may raise a `Problem`. That,
    and what is too long or too slow, is kept as ``problem``.
    """

    def __init__(
        self, receive: Receive, most: int, seconds: float, on_complete: Callable[[], None]
    ) -> None:
        self._receive, self._most, self._on_complete = receive, most, on_complete
        self._until = asyncio.get_running_loop().time() + seconds
        self._size, self._complete = 0, False
        self._read: Message | None = None
        self.problem: Problem | None = None

    async def receive(self) -> Message:
        """The next part, as ASGI has it."""
        if self._read is not None:
            message, self._read = self._read, None
            return message
        if self._complete:  # from here on it only waits for the client to go away
            return await self._receive()
        try:
            return await self._next()
        except Problem as problem:
            self.problem = problem
            raise

    async def read(self) -> bool:
        """Receive all of it, to be had from `receive` as one part; False if the client leaves."""
        parts = []
        while not self._complete:
            message = await self.receive()
            if message["type"] != "http.request":
                return False
            parts.append(message.get("body", b""))
        self._read = {"type": "http.request", "body": b"".join(parts), "more_body": False}
        return True

    async def throw_away(self) -> None:
        """Take the rest, up to a limit, for as long as there is time."""
        taken = 0
        with suppress(asyncio.TimeoutError):
            while taken < THROWN_AWAY and not self._complete:
                message = await asyncio.wait_for(self._receive(), self._remaining())
                taken += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    self._complete = True

    async def _next(self) -> Message:
        try:
            message = await asyncio.wait_for(self._receive(), self._remaining())
        except asyncio.TimeoutError:
            raise Problem(408, "the body of the request did not come in time") from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._most:
                self._complete = not message.get("more_body", False)
                raise too_long(self._most)
            if not message.get("more_body", False):
                self._complete = True
                self._on_complete()
        return message

    def _remaining(self) -> float:
        return self._until - asyncio.get_running_loop().time()


def too_long(most: int) -> Problem:
    size = f"{most // 2**20} MiB" if most >= 2**20 else f"{most // 2**10} KiB"
    return Problem(413, f"the request is too long: at most {size} are read")
