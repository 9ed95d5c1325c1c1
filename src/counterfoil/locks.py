"""One writer at a time: file locks that the kernel frees when their process ends, however it ends.

A lock is a small file, locked with ``flock``. While it is held, the file says by whom, so that
another process can be told. Its holder removes it at the end; one that a kill left behind is free,
and is taken by whoever comes next. If a file system cannot lock, nobody is refused.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from counterfoil.errors import BusyError
from counterfoil.progress import Progress, Silent

if sys.platform != "win32":  # there, nothing is locked
    import fcntl

LOCK = ".lock"
"""Name of a lock file inside the folder that it locks."""

ATTEMPTS = 100
LONGEST_PAUSE = 1.0
SECRET = r"[\w.-]*(?:key|token|password|secret)[\w.-]*"  # noqa: S105 - names of options


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    pid: int
    host: str
    since: str
    command: str

    @classmethod
    def current(cls) -> Holder:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(os.getpid(), platform.node(), now, _command(sys.argv))

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """What a lock file says; None if it says nothing (yet), or nothing of this form."""
        try:
            tree = json.loads(path.read_bytes()[:10_000])
            holder = cls(**tree)
        except (OSError, ValueError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) and 0 < holder.pid < 1 << 31 else None

    @property
    def is_gone(self) -> bool:
        """Whether this was a process of this machine, and there is none of its id."""
        if self.host != platform.node() or sys.platform == "win32":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # somebody else's process
            return False
        return False

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host} since {self.since}: {self.command}"
        return "".join(character if character.isprintable() else "?" for character in text)


class Lock:
    """A lock file. Processes started from this one, by ``fork`` or otherwise, do not hold it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path.parent)) / path.name
        self.thread = 0
        self.works = True
        """Whether the file system can lock; else `try_acquire` never fails."""
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock; False if another process, or another ``Lock`` of this one, has it."""
        with _guard:
            for left in reversed(range(ATTEMPTS)):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    descriptor = _open(self.path)
                except FileNotFoundError:  # its last holder removed the folder
                    continue
                free = self._try_flock(descriptor)
                if not free:
                    os.close(descriptor)
                    return False
                # In the end it is taken as it is: the file may get a new number at every look.
                if not self.works or _is_at(descriptor, self.path) or not left:
                    break
                os.close(descriptor)  # its last holder removed the file while this one waited
            else:
                return False
            self._descriptor, self.thread = descriptor, threading.get_ident()
            _held.add(self)
            with suppress(OSError):  # a full disk; the lock holds all the same
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(asdict(Holder.current())).encode())
        return True

    def _try_flock(self, descriptor: int) -> bool:
        if sys.platform == "win32":
            self.works = False
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # as on some network drives
            self.works = False
        return True

    def release(self) -> None:
        with _guard:
            if self._descriptor is None:  # never taken, or this is a fork of the holder
                return
            with suppress(OSError):
                # Only while it is locked, and only this file: the path may be another's by now.
                if _is_at(self._descriptor, self.path):
                    os.unlink(self.path)
            self.forget()
            _held.discard(self)

    def forget(self) -> None:
        """Close the file; the lock stays with the processes that have it open otherwise."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool | None:
        """Whether somebody has it, without taking it; None if the file system cannot say."""
        lock = Lock(self.path)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            free = lock._try_flock(descriptor)
        finally:
            os.close(descriptor)
        return not free if lock.works else None

    def holder(self) -> Holder | None:
        """Who has it; a holder needs a moment to write this down after taking the lock."""
        for _ in range(10):
            holder = Holder.read(self.path)
            if holder is not None and not holder.is_gone:
                return holder
            time.sleep(0.05)
        return None


@contextmanager
def locked_folder(
    folder: Path, doing: str, advice: str = "wait for it, or stop it", name: str = LOCK
) -> Iterator[None]:
    """Be the only process ``doing`` something in a folder; `BusyError` names the other one.

    The folder is made if it is not there. The thread that holds the lock may take it again.
    Processes that only read take no lock.
    """
    new = not folder.exists()
    try:
        with _locked(folder / name, folder, doing, advice):
            yield
    finally:
        if new:
            with suppress(OSError):  # unless something was put there
                folder.rmdir()


@contextmanager
def locked_target(
    target: Path, doing: str, advice: str = "wait for it, or stop it"
) -> Iterator[None]:
    """The same for a file or folder that is replaced as a whole: its lock lies beside it."""
    with _locked(beside(target), target, doing, advice):
        yield


def beside(target: Path) -> Path:
    """The lock file of something that is replaced as a whole."""
    place = Path(os.path.realpath(target))
    return place.with_name(f".{place.name}{LOCK}")


@contextmanager
def _locked(path: Path, subject: Path, doing: str, advice: str) -> Iterator[None]:
    lock = Lock(path)
    mine = threading.get_ident()
    if any(held.path == lock.path and held.thread == mine for held in list(_held)):
        yield
        return
    if not lock.try_acquire():
        holder = lock.holder()
        who = f" ({holder})" if holder is not None else ""
        raise BusyError(f"{subject}: another process is {doing}{who}; {advice}")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_in_turn(
    path: Path,
    waits_for: str,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[bool]:
    """Wait until no other process holds a lock file; False if ``should_stop`` ends the waiting."""
    lock, pause = Lock(path), 0.02
    while not lock.try_acquire():
        if should_stop():
            yield False
            return
        if pause == 0.02:
            (progress or Silent()).say(f"waiting for another process that is {waits_for}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    try:
        yield True
    finally:
        lock.release()


_held: set[Lock] = set()
_guard = threading.RLock()


def _forget_in_child() -> None:
    """A forked process shares the locked files of its parent, and would keep them locked."""
    for lock in _held:
        lock.forget()
    _held.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    # Nobody forks between opening a lock file and writing down that it is open.
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget_in_child
    )


def _open(path: Path) -> int:
    flags = getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:  # another user's, left by a kill
        return os.open(path, os.O_RDONLY | flags)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _command(words: list[str]) -> str:
    """A command line, shortened, and without values of options that are secret."""
    program = Path(words[0]) if words else Path(sys.executable)
    shown = [program.parent.name if program.name == "__main__.py" else program.name]
    for before, word in zip(["", *words[1:]], words[1:], strict=False):
        if re.fullmatch(f"--{SECRET}", before):
            word = "***"
        shown.append(re.sub(f"^({SECRET}=).*", r"\1***", word, flags=re.DOTALL))
    text = shlex.join(shown)
    return text if len(text) <= 300 else f"{text[:300]}…"
