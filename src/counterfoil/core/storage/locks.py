"""File locks for one writer at a time; the kernel frees them when their process ends.

A lock is a small file, locked with ``flock``, that names its holder for error messages. The holder
removes it at the end. A file that a kill left behind is free for the next process. If a file
system cannot lock, every attempt succeeds. Without ``fcntl``, as on Windows, there are no locks.
"""

from __future__ import annotations

import errno
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

from counterfoil.core.errors import BusyError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.reading import open_descriptor, read_bytes

try:
    import fcntl

    CAN_LOCK = True
except ImportError:  # Windows
    CAN_LOCK = False

LOCK = ".lock"
"""Name of a lock file inside the folder that it locks."""

ATTEMPTS = 100
MAX_PAUSE_SECONDS = 1.0
MAX_TEXT_CHARS = 300
MAX_FILE_BYTES = 10_000
SECRET = re.compile("key|token|passw|passphrase|pwd|secret|credential|authorization", re.IGNORECASE)
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


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
        """The holder named in a lock file; None if the file is empty or has another form."""
        try:
            holder = cls(**json.loads(read_bytes(path, MAX_FILE_BYTES)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        texts = (holder.host, holder.since, holder.command)
        valid = type(holder.pid) is int and 0 < holder.pid < 1 << 31
        return holder if valid and all(isinstance(text, str) for text in texts) else None

    @property
    def is_gone(self) -> bool:
        """Whether this was a process of this machine that no longer exists."""
        if self.host != platform.node() or sys.platform == "win32":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's process
            pass
        return False

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host} since {self.since}: {self.command}"
        text = "".join(character if character.isprintable() else "?" for character in text)
        return _shorten(text, 2 * MAX_TEXT_CHARS)


class Lock:
    """A lock file. Child processes, forked or not, do not hold it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path.parent)) / path.name
        self.thread = 0
        self.works = True
        """Whether the file system can lock; otherwise `try_acquire` always succeeds."""
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock; False if another process, or another ``Lock`` of this one, has it.

        Creates the folder if needed; `PermissionError` if it is not writable.
        """
        if not CAN_LOCK:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.works = False
            return True
        holder = Holder.current()
        with _guard:
            descriptor = self._try_open_locked()
            if descriptor is None:
                return False
            self._descriptor, self.thread = descriptor, threading.get_ident()
            _active.add(self)
            with suppress(OSError):  # on a full disk, the lock works without the text
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(asdict(holder)).encode())
        return True

    def _try_open_locked(self) -> int | None:
        """A descriptor of the locked lock file; None if another process holds the lock."""
        problem: OSError | None = None
        for left in reversed(range(ATTEMPTS)):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = _open(self.path)
            except (FileNotFoundError, FileExistsError, PermissionError) as error:
                problem = error  # the last holder may have just removed the file or the folder
                continue
            if not self._try_flock(descriptor):
                os.close(descriptor)
                return None
            # The last attempt skips the check: some file systems change inode numbers.
            if not self.works or _is_at(descriptor, self.path) or not left:
                return descriptor
            os.close(descriptor)  # the last holder removed the file meanwhile
        raise problem or FileNotFoundError(errno.ENOENT, "cannot be created", str(self.path))

    def _try_flock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network drives cannot lock
            self.works = False
        return True

    def release(self) -> None:
        with _guard:
            if self._descriptor is None:  # never taken, or this is a fork of the holder
                return
            with suppress(OSError):
                # Only this file: the path may belong to another holder by now.
                if _is_at(self._descriptor, self.path):
                    os.unlink(self.path)
            self.forget()
            _active.discard(self)

    def forget(self) -> None:
        """Close the file; other processes that have it open keep the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool | None:
        """Whether any process holds it; None if the file system cannot lock."""
        if not CAN_LOCK:
            return None
        lock = Lock(self.path)
        descriptor = open_descriptor(self.path)
        try:
            free = lock._try_flock(descriptor)
        finally:
            os.close(descriptor)
        return not free if lock.works else None

    def holder(self) -> Holder | None:
        """The process that holds it, if the file names one; retried, as it is written late."""
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

    Creates the folder if needed. The thread that holds the lock may take it again. Readers take no
    lock.
    """
    new = not folder.exists()
    try:
        with _locked(folder / name, folder, doing, advice):
            yield
    finally:
        if new:
            with suppress(OSError):  # not empty
                folder.rmdir()


@contextmanager
def locked_target(
    target: Path, doing: str, advice: str = "wait for it, or stop it"
) -> Iterator[bool]:
    """`locked_folder` for a file or folder that is replaced as a whole: its lock is beside it.

    Yields False if the file system cannot lock; other processes may then be writing, too.
    """
    with _locked(beside(target), target, doing, advice) as works:
        yield works


def beside(target: Path) -> Path:
    """The lock file of a file or folder that is replaced as a whole."""
    path = Path(os.path.realpath(target))
    return path.with_name(f".{path.name}{LOCK}")


@contextmanager
def _locked(path: Path, subject: Path, doing: str, advice: str) -> Iterator[bool]:
    lock = Lock(path)
    for other in list(_active):
        if other.path == lock.path and other.thread == threading.get_ident():
            yield other.works
            return
    if not lock.try_acquire():
        raise BusyError(f"{subject}: {_busy(lock, doing)}; {advice}")
    try:
        yield lock.works
    finally:
        lock.release()


def _busy(lock: Lock, doing: str) -> str:
    if any(other.path == lock.path for other in list(_active)):
        return f"another thread of this process is {doing}"
    holder = lock.holder()
    return f"another process is {doing}" + (f" ({holder})" if holder is not None else "")


@contextmanager
def locked_in_turn(
    path: Path,
    waits_for: str,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[bool]:
    """Wait for a lock file; yields False if ``should_stop`` ended the wait."""
    lock, pause = Lock(path), 0.02
    while not lock.try_acquire():
        if should_stop():
            yield False
            return
        if pause == 0.02:
            (progress or Silent()).say(f"waiting for another process that is {waits_for}")
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    try:
        yield True
    finally:
        lock.release()


_active: set[Lock] = set()
"""Locks that this process holds."""

_guard = threading.RLock()


def _forget_in_child() -> None:
    """A forked process shares its parent's open files, and would keep them locked."""
    for lock in _active:
        lock.forget()
    _active.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    # No fork between opening a lock file and adding it to `_active`.
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget_in_child
    )


def _open(path: Path) -> int:
    # O_NONBLOCK: the path may be a FIFO.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        refusal = error
    try:
        return os.open(path, os.O_RDONLY | flags)  # another user's file, left by a kill
    except FileNotFoundError:
        raise PermissionError(
            refusal.errno,
            f"this folder cannot be written ({refusal.strerror}), so it cannot be locked; choose "
            "another folder, or get write permission",
            str(path.parent),
        ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _command(words: list[str]) -> str:
    """A command line, shortened and without secrets, as other users can read it."""
    program = Path(words[0]) if words else Path(sys.executable)
    parts = [program.parent.name if program.name == "__main__.py" else program.name]
    options = words[1 : 1 + MAX_TEXT_CHARS]
    for before, word in zip(["", *options], options, strict=False):
        is_value = before.startswith("-") and "=" not in before and SECRET.search(before)
        parts.append("***" if is_value else _masked(word))
    return _shorten(shlex.join(parts), MAX_TEXT_CHARS)


def _masked(word: str) -> str:
    """A word of a command line without passwords in URLs and without values of secret keys.

    Takes linear time, as a word can be very long.
    """
    scheme, mark, address = word.partition("://")
    if mark and "@" in address:
        word = f"{scheme}://***@{address.rpartition('@')[2]}"
    name = SECRET.search(word)
    value = re.compile("[=:]").search(word, name.end()) if name else None
    return _shorten(f"{word[: value.end()]}***" if value else word, MAX_TEXT_CHARS)


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"
