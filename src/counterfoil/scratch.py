"""Temporary folders that a kill does not leave for ever: the next one of their kind sweeps them.

Each holds a lock while its process lives. A folder is swept only if that lock says so: it was
taken once by a process of this machine, and nobody holds it now.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import finalize

from counterfoil.locks import LOCK, Holder, Lock


class Scratch:
    """An empty folder of this process alone; `close`, or the end of the process, removes it."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _sweep(parent, prefix)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = Lock(self.folder / LOCK)
        lock.try_acquire()
        self._remove = finalize(self, _remove, self.folder, lock, os.getpid())

    def close(self) -> None:
        self._remove()


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder for the length of a block."""
    scratch = Scratch(prefix, parent)
    try:
        yield scratch.folder
    finally:
        scratch.close()


def _remove(folder: Path, lock: Lock, pid: int) -> None:
    if os.getpid() == pid:  # not what a forked process shares with its parent
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if _is_own_folder(folder) and _is_abandoned(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_own_folder(folder: Path) -> bool:
    """Whether it is a folder of this user: others can write to a folder of temporary files, too."""
    status = folder.lstat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISDIR(status.st_mode) and is_own


def _is_abandoned(path: Path) -> bool:
    if not path.is_file():
        return False
    holder, is_held = Holder.read(path), Lock(path).is_held()
    if holder is None or holder.host != Holder.current().host:
        return False  # being made just now, or on another machine that shares this folder
    return holder.is_gone if is_held is None else not is_held
