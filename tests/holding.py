"""A lock that somebody else holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterfoil.locks import LOCK, Lock


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file in another thread, which counts as another process."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        lock = Lock(path)
        assert lock.try_acquire()
        taken.set()
        done.wait(120)
        lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def content(folder: Path) -> dict[str, bytes]:
    """The files below a folder, but for locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(LOCK)
    }
