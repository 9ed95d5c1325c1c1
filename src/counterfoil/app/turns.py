"""Fairness on the event loop: tasks that have more than a moment of work to do take turns."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one waiting task per iteration of the event loop continue, in order of arrival.

    asyncio runs everything that is ready before it looks for new events. Fifty requests that arrive
    together, or the responses to a whole batch, would thus delay a health check by the sum of their
    work. With turns, it waits for a few of them at most.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # nobody gives the turns of a loop that has ended
            self._loop = loop
            self._waiting.clear()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._give, loop)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._waiting[0].done():  # cancelled while it waited
            self._waiting.popleft()
        if not self._waiting:
            return
        self._waiting.popleft().set_result(None)
        if self._waiting:
            loop.call_soon(self._give, loop)
