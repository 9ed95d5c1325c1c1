"""One process a run or guide: two tables that share a row may be made at the same time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def _taken(file: IO[str]) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
