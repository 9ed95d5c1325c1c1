"""One process a run or guide: two tables that share a row may be made at the same time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from counterfoil.progress import Progress

if sys.platform != "win32":  # where nothing is locked
    import fcntl

POLL = 1.0


@contextmanager
def alone(
    path: Path, title: str, progress: Progress, should_stop: Callable[[], bool]
) -> Iterator[bool]:
    """Wait until no other process holds ``path``; False where the user stops the waiting.

    The lock goes with the process: a kill leaves nothing behind that would have to be removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        told = False
        while not _taken(file):
            if should_stop():
                yield False
                return
            if not told:
                progress.say(f"waiting for another process that is making {title}")
                told = True
            time.sleep(POLL)
        yield True


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process is writing into a folder; it leaves no file behind.

    Where folders cannot be locked, as on some network drives, nobody waits.
    """
    if sys.platform == "win32":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _taken(file: IO[str]) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
