"""Dynamic batching: a queue of jobs, and the thread that runs the models on batches of them.

The thread takes the oldest job and all waiting jobs of the same kind, up to a limit. So no job
waits for a batch to fill up, and batches grow with the load. The requests of a batch take turns to
send their responses.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from counterfoil.app.connections import Limits
from counterfoil.app.guard import Meters
from counterfoil.app.problems import RETRY_HEADERS, Problem
from counterfoil.app.turns import Turns


@dataclass(frozen=True)
class _Waiting:
    work: Any
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class BatchQueue:
    """Calls ``run`` on lists of jobs of one type, on its own thread.

    ``run`` returns one result per job, in order.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        limits: Limits,
        meters: Meters,
        turns: Turns | None = None,
    ) -> None:
        self._run, self.limits, self.meters = run, limits, meters
        self._turns = turns or Turns()
        self._waiting: deque[_Waiting] = deque()
        self._wake = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="models", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._open and self._thread.is_alive()

    async def submit(self, work: Any) -> Any:
        """The result of a job; raises a `Problem` if the queue is full or the job times out."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(work, loop.create_future(), loop)
        with self._wake:
            if not self._open:
                raise Problem(503, "the service is shutting down", RETRY_HEADERS)
            if len(self._waiting) >= self.limits.waiting:  # drop jobs that have timed out
                self._waiting = deque(w for w in self._waiting if not w.future.done())
            if len(self._waiting) >= self.limits.waiting:
                raise Problem(503, "too much work is waiting; try again in a moment", RETRY_HEADERS)
            self._waiting.append(waiting)
            self._wake.notify()
        try:
            result = await asyncio.wait_for(waiting.future, self.limits.timeout)
        except asyncio.TimeoutError:
            raise Problem(503, "the request timed out; try again", RETRY_HEADERS) from None
        await self._turns.take()
        return result

    def close(self) -> None:
        """Accept no more jobs, and wait up to ``limits.drain`` seconds for the queued ones."""
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join(self.limits.drain)

    def _work(self) -> None:
        while batch := self._next():
            self.meters.batch(type(batch[0].work).__name__.lower(), len(batch))
            self._answer(batch)

    def _next(self) -> list[_Waiting]:
        """The oldest job that has not timed out, with others of its kind; empty when closed."""
        with self._wake:
            while True:
                while self._waiting and self._waiting[0].future.done():
                    self._waiting.popleft()
                if self._waiting:
                    break
                if not self._open:
                    return []
                self._wake.wait()
            kind = type(self._waiting[0].work)
            same = (w for w in self._waiting if type(w.work) is kind and not w.future.done())
            batch = list(islice(same, self.limits.batch))
            taken = set(map(id, batch))
            self._waiting = deque(w for w in self._waiting if id(w) not in taken)
            return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        try:
            results: Sequence[Any] = self._run([waiting.work for waiting in batch])
        except Exception as error:
            if len(batch) > 1:  # run them one by one, so that only the faulty job fails
                for waiting in batch:
                    self._answer([waiting])
                return
            results = [error]
        for waiting, result in zip(batch, results, strict=True):
            with suppress(RuntimeError):  # the event loop is closed: the service has stopped
                waiting.loop.call_soon_threadsafe(_settle, waiting.future, result)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():  # timed out
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
