"""Worker processes: a parallel map, the number of usable cores, an end with their parent."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from counterfoil.core.progress import Progress

DEFERRED = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")
R = TypeVar("R")

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
WATCH_SECONDS = 1.0
"""Interval at which a worker checks that its parent exists."""


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and the CPU quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS, Windows
        cores = os.cpu_count() or 1
    quota = _cpu_quota(CGROUPS, OWN_CGROUP)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cpu_quota(root: Path, own: Path) -> float | None:
    """The smallest quota of this process's control group and its parents, in cores, if any."""
    quotas = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = Path(name.lstrip("/"))
            for path in (group, *group.parents):
                # version 2, which has no list of controllers, and version 1
                folder = root / path if not controllers else root / "cpu" / path
                quotas += _quota_of(folder)
    return min(quotas, default=None)


def _quota_of(folder: Path) -> list[float]:
    with suppress(OSError, ValueError):
        allowed, period = (folder / "cpu.max").read_text().split()
        return [] if allowed == "max" else [int(allowed) / int(period)]
    with suppress(OSError, ValueError, ZeroDivisionError):
        allowed = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        return [int(allowed) / int(period)] if int(allowed) > 0 else []
    return []


def ordered_map(
    function: Callable[[T], R], tasks: Sequence[T], workers: int | None = None
) -> Iterator[R]:
    """``function`` of each task, in order, by ``workers`` processes (default: one per usable core).

    ``function`` must be a top-level function. Only a few results are buffered, so memory does not
    grow with the number of tasks.
    """
    workers = min(workers or usable_cores(), len(tasks))
    if workers <= 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_begin_worker)
    waiting: deque[Future[R]] = deque()
    try:
        for task in tasks:
            with _signals_deferred():  # the first submits start processes
                waiting.append(pool.submit(function, task))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM at the end of the block.

    A handler that raises while an executor starts its processes leaves some that the executor does
    not know; the program would wait for them forever. Handlers run in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: received.append(number))
        for signum in DEFERRED
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    for number in received:
        signal.raise_signal(number)


def _begin_worker() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the inherited handlers defer
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()


def end_with_parent(grace: float = 0.0) -> None:
    """End this process ``grace`` seconds after its parent ended or was killed.

    A killed process cannot end its workers. They would wait forever and hold their memory, as
    forked siblings keep the pipes of the parent open.
    """
    parent, starter = multiprocessing.parent_process(), os.getppid()

    def is_gone() -> bool:
        # Both checks: with a fork server the starter is not the parent, and a forked sibling may
        # keep the parent's pipe open.
        return os.getppid() != starter or (parent is not None and not parent.is_alive())

    def watch() -> None:
        while not is_gone():
            time.sleep(WATCH_SECONDS)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def begin_loader_worker(number: int) -> None:
    """``worker_init_fn`` of a PyTorch `DataLoader`."""
    end_with_parent()


def bounded_workers(wanted: int, setting: str, progress: Progress | None = None) -> int:
    """At most one worker process per usable core; ``progress`` reports a reduction."""
    cores = usable_cores()
    if wanted > cores and progress is not None:
        progress.say(f"note: {setting}={wanted}, but {cores} core(s) can be used: {cores} started")
    return min(wanted, cores)


def _context() -> multiprocessing.context.BaseContext:
    """Fork if the system has it: spawn would run a script without a main guard again."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else None)
