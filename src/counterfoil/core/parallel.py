"""Processes that work for this one: how many there may be, and that they end when it does."""

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
"""Between two looks of a worker at whether its parent is there."""


def usable_cores() -> int:
    """Cores that this process may use: by its affinity and by the CPU quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS, Windows
        cores = os.cpu_count() or 1
    quota = _cpu_quota(CGROUPS, OWN_CGROUP)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cpu_quota(root: Path, own: Path) -> float | None:
    """The smallest quota of this process's control group and those around it, in cores."""
    quotas = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = Path(name.lstrip("/"))
            for place in (group, *group.parents):
                # version 2, which has no list of controllers, and version 1
                folder = root / place if not controllers else root / "cpu" / place
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
    """``function`` of each task in order; ``workers`` processes, by default one per usable core.

    ``function`` must be a top-level function. At most a few results wait to be taken, so memory
    does not grow with the number of tasks.
    """
    workers = min(workers or usable_cores(), len(tasks))
    if workers <= 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_begin_worker)
    waiting: deque[Future[R]] = deque()
    try:
        for task in tasks:
            with _signals_deferred():  # this starts processes, at first
                waiting.append(pool.submit(function, task))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM afterwards.

    A handler that raises while an executor starts its processes leaves some that it does not know
    of. They wait for work, and the program for them, when it ends. Handlers run in the main thread:
    in any other, nothing has to be deferred.
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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it inherits handlers that defer
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()


def end_with_parent(grace: float = 0.0) -> None:
    """End this process when the one that started it is gone, killed or not.

    A process that was killed cannot end its workers. Some would wait for it for ever, with all of
    their memory: forked siblings keep its pipes open. A worker that ends by itself when it notices
    has ``grace`` seconds for that.
    """
    parent, starter = multiprocessing.parent_process(), os.getppid()

    def is_gone() -> bool:
        # A fork server starts processes for their parent; the pipe of a parent may have copies.
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
    """At most one worker process per usable core; a line of ``progress`` says if that is fewer."""
    cores = usable_cores()
    if wanted > cores and progress is not None:
        progress.say(f"note: {setting}={wanted}, but {cores} core(s) can be used: {cores} started")
    return min(wanted, cores)


def _context() -> multiprocessing.context.BaseContext:
    """Fork where there is fork: a script without a main guard must not be run again."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else None)
