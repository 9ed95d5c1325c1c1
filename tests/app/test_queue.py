"""The queue: work that waits goes through together, and nobody pays for another's mistake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.app.connections import Limits
from counterfoil.app.guard import Meters
from counterfoil.app.problems import Problem
from counterfoil.app.queue import BatchQueue
from tests.app.test_turns import iterations

LIMITS = Limits(waiting=1000, batch=8, timeout=60.0, drain=60.0)


@dataclass(frozen=True)
class Double:
    number: int


@dataclass(frozen=True)
class Negate:
    number: int


class Worker:
    """Doubles or negates; notes its batches; can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()

    def __call__(self, work: Sequence[Double | Negate]) -> list[int]:
        self.busy.set()
        assert self.gate.wait(60)
        self.batches.append(list(work))
        if any(one.number == 13 for one in work):
            raise ValueError("thirteen")
        return [2 * w.number if isinstance(w, Double) else -w.number for w in work]


async def held(worker: Worker, queue: BatchQueue) -> asyncio.Task:
    """Keep the worker busy with one piece of work until its gate opens."""
    worker.gate.clear()
    first = asyncio.ensure_future(queue.submit(Double(0)))
    while not worker.busy.is_set():
        await asyncio.sleep(0.001)
    return first


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40), st.integers(1, 9))
def test_every_piece_of_work_gets_its_own_result(asked, size) -> None:
    worker = Worker()

    async def ask() -> list[int]:
        queue = BatchQueue(worker, replace(LIMITS, batch=size), Meters())
        first = await held(worker, queue)
        work = [Double(n) if double else Negate(n) for double, n in asked]
        waiting = [asyncio.ensure_future(queue.submit(one)) for one in work]
        await asyncio.sleep(0)
        worker.gate.set()
        result = await asyncio.gather(*waiting)
        await first
        queue.close()
        return result

    assert asyncio.run(ask()) == [2 * n if double else -n for double, n in asked]
    assert all(len(batch) <= size for batch in worker.batches)
    assert all(len({type(one) for one in batch}) == 1 for batch in worker.batches)
    for kind, count in ((True, 0), (False, 0)):
        count = sum(double is kind for double, _ in asked)
        batches = [b for b in worker.batches[1:] if isinstance(b[0], Double) is kind]
        assert len(batches) == -(-count // size)  # no more batches than it takes


def test_one_that_fails_does_not_fail_the_others() -> None:
    worker = Worker()

    async def ask() -> list[object]:
        queue = BatchQueue(worker, LIMITS, Meters())
        first = await held(worker, queue)
        waiting = [asyncio.ensure_future(queue.submit(Double(n))) for n in (1, 13, 3)]
        await asyncio.sleep(0)
        worker.gate.set()
        await first
        result = await asyncio.gather(*waiting, return_exceptions=True)
        queue.close()
        return result

    one, thirteen, three = asyncio.run(ask())
    assert (one, three) == (2, 6)
    assert isinstance(thirteen, ValueError)


def test_results_of_a_batch_reach_the_event_loop_one_by_one() -> None:
    worker = Worker()

    async def ask() -> Sequence[int]:
        queue = BatchQueue(worker, replace(LIMITS, batch=32), Meters())
        first = await held(worker, queue)

        async def submit() -> None:
            if len(queue) == 29:  # the last one
                asyncio.get_running_loop().call_later(0.01, worker.gate.set)
            await queue.submit(Double(1))

        continued = await iterations(submit, 30)
        await first
        queue.close()
        return continued

    continued = asyncio.run(ask())
    assert [len(batch) for batch in worker.batches] == [1, 30]
    assert len(set(continued)) == 30


async def tried(queue: BatchQueue, work: Double) -> int | None:
    """The result of some work; None if a busy machine took too long for it."""
    try:
        return await queue.submit(work)
    except Problem:
        return None


def test_a_full_queue_and_a_slow_model_are_problems() -> None:
    worker = Worker()

    async def ask() -> None:
        queue = BatchQueue(worker, Limits(waiting=1, timeout=0.05, drain=60.0), Meters())
        first = await held(worker, queue)
        second = asyncio.ensure_future(queue.submit(Double(1)))
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="too much work"):
            await queue.submit(Double(2))
        for late in (first, second):
            with pytest.raises(Problem, match="timed out"):
                await late
        worker.gate.set()
        assert 6 in [await tried(queue, Double(3)) for _ in range(9)]
        queue.close()

    asyncio.run(ask())
    assert Double(1) not in [one for batch in worker.batches for one in batch]


def test_closing_finishes_what_waits_and_takes_no_more() -> None:
    worker = Worker()

    async def ask() -> list[int]:
        queue = BatchQueue(worker, LIMITS, Meters())
        first = await held(worker, queue)
        rest = [asyncio.ensure_future(queue.submit(Negate(n))) for n in range(20, 40)]
        await asyncio.sleep(0)
        worker.gate.set()
        await asyncio.get_running_loop().run_in_executor(None, queue.close)
        assert not queue.alive
        with pytest.raises(Problem, match="shutting down"):
            await queue.submit(Double(1))
        await first
        return await asyncio.gather(*rest)

    assert asyncio.run(ask()) == [-n for n in range(20, 40)]
