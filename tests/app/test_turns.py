"""Turns: however many tasks are ready, one per iteration of the event loop continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from counterfoil.app.turns import Turns


async def iterations(wait: Callable[[], Awaitable[object]], tasks: int) -> Sequence[int]:
    """For each of some tasks, in order of their continuation: the iteration of the event loop."""
    loop = asyncio.get_running_loop()
    now, continued = 0, []

    def count() -> None:
        nonlocal now
        now += 1
        timer[0] = loop.call_soon(count)

    async def one() -> None:
        await wait()
        continued.append(now)

    timer = [loop.call_soon(count)]
    await asyncio.gather(*(one() for _ in range(tasks)))
    timer[0].cancel()
    return continued


def test_one_task_per_iteration_continues() -> None:
    async def run() -> Sequence[int]:
        return await iterations(Turns().take, 20)

    continued = asyncio.run(run())
    assert len(continued) == len(set(continued)) == 20
    assert continued[-1] - continued[0] == 19  # none is left out, either


def test_turns_come_in_order_and_again_after_a_pause() -> None:
    async def run() -> list[int]:
        turns, order = Turns(), []

        async def one(number: int) -> None:
            await turns.take()
            order.append(number)

        await asyncio.gather(*map(one, range(5)))
        await asyncio.sleep(0)
        await asyncio.gather(*map(one, range(5, 9)))
        return order

    assert asyncio.run(run()) == list(range(9))


def test_a_task_that_is_cancelled_does_not_stop_the_others() -> None:
    async def run(cancelled: Sequence[int]) -> list[object]:
        turns = Turns()
        tasks = [asyncio.create_task(turns.take()) for _ in range(6)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        await asyncio.wait_for(turns.take(), 60)
        return [isinstance(result, asyncio.CancelledError) for result in results]

    for cancelled in ([0], [2, 3], [5], [3, 4, 5], range(6)):
        assert asyncio.run(run(cancelled)) == [number in cancelled for number in range(6)]


def test_turns_of_an_event_loop_that_ended_do_not_stop_the_next_one() -> None:
    turns = Turns()
    ended = asyncio.new_event_loop()
    waiting = ended.create_task(turns.take())
    ended.call_soon(ended.stop)
    ended.run_forever()
    assert not waiting.done()
    ended.close()
    asyncio.run(asyncio.wait_for(turns.take(), 20))
