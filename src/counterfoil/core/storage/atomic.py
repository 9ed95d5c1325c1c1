"""Writing so that a kill or a full disk at any moment costs neither the old state nor the new one.

A file, or a folder with a new name, appears in one step. A folder that replaces another takes two
renames: a kill between them leaves nothing under its name, and the older folder beside it, in
``.NAME.old.*``. Whoever writes there next puts it back first (`replacing`).

Every file that is renamed into its place goes through here. Files and folders get the rights that
the user's umask leaves (not the private ones of ``tempfile``), and a name is on the disk, too,
before the next step is taken.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import finalize

from counterfoil.core.errors import DataError
from counterfoil.core.storage.locks import LOCK, Holder, Lock, locked_target

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}

DEFAULT_CACHE = Path.home() / ".cache" / "counterfoil"
"""Folder of generated scenes and cached features, if none is named."""

SYNC_ALL_FROM = 500
"""Files from which on it is quicker to flush everything than one after the other."""

ADVICE = "wait for it, or name another folder"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file in one step; its content is on the disk before its name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("xb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def put_in_place(new: Path, path: Path) -> None:
    """Rename a finished file, link or folder; the new name is on the disk when this returns."""
    os.replace(new, path)
    sync_folder(path.parent)
    if new.parent != path.parent:
        sync_folder(new.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; it takes its place, and that of an older one, when the block ends."""
    with replacing(path, "writing it"):
        new = _make_sibling(path, "new")
        try:
            yield new
            share(new)
            sync_tree(new)
            replace_folder(new, path)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


@contextmanager
def replacing(path: Path, doing: str, advice: str = "wait for it, or stop it") -> Iterator[None]:
    """`locked_target` for a folder; what a killed process left beside it is put in order first."""
    with locked_target(path, doing, advice) as works:
        if works:  # else what lies there may be in use
            _recover(path)
        yield


def _recover(path: Path) -> None:
    """Put back an older folder that was moved aside but not replaced; delete all other remains."""
    remains = {kind: _siblings(path, kind) for kind in ("old", "new")}
    for folder in remains["old"]:
        older = folder / path.name
        if not os.path.lexists(path) and os.path.lexists(older):
            put_in_place(older, path)
    for folder in [*remains["old"], *remains["new"]]:
        shutil.rmtree(folder, ignore_errors=True)


def _siblings(path: Path, kind: str) -> list[Path]:
    """What `_make_sibling` made, the latest first."""
    names = re.compile(re.escape(f".{path.name}.{kind}.") + "[0-9a-f]{8}")
    found = [
        folder
        for folder in path.parent.iterdir()
        if names.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
    ]
    return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)


def _make_sibling(path: Path, kind: str) -> Path:
    """An empty folder beside ``path``, to be filled or to be thrown away."""
    folder = path.with_name(f".{path.name}.{kind}.{secrets.token_hex(4)}")
    folder.mkdir()
    return folder


def replace_folder(new: Path, path: Path) -> None:
    """Rename a folder that is on the disk; an older one at ``path`` is deleted, once replaced.

    Only while the lock of ``path`` is held (`replacing`).
    """
    if not path.exists():
        put_in_place(new, path)
        return
    old = _make_sibling(path, "old")
    try:
        os.replace(path, old / path.name)
        put_in_place(new, path)
    except BaseException:
        if not path.exists():
            os.replace(old / path.name, path)
        raise
    finally:
        if path.exists():  # never the only copy
            shutil.rmtree(old, ignore_errors=True)


def share(folder: Path) -> None:
    """Give the files below a folder its own rights: some libraries write private ones."""
    rights = folder.stat().st_mode & 0o666
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if not path.is_symlink() and path.stat().st_mode & 0o777 != rights:
                path.chmod(rights)


def sync_tree(folder: Path) -> None:
    """Put the files below a folder on the disk, and their names."""
    if hasattr(os, "sync") and sum(len(names) for _, _, names in os.walk(folder)) > SYNC_ALL_FROM:
        os.sync()
        return
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                sync_file(path)
        sync_folder(Path(place))


def sync_file(path: Path) -> None:
    """Put a file that is closed on the disk."""
    _sync(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, if its file system can do that."""
    if sys.platform == "win32":
        return
    try:
        _sync(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when all went well.

    On any error it is removed, and what was at ``target`` is untouched. Two processes cannot write
    to one ``target`` at the same time.
    """
    target = Path(os.path.abspath(target))
    _refuse_unsafe(target, overwrite)
    try:
        with replacing(target, "writing a data set there", ADVICE):
            _refuse_unsafe(target, overwrite)  # another process may have been faster
            with atomic_folder(target) as folder:
                yield folder
    except OSError as error:
        raise DataError(_reason(target, error)) from error


def _refuse_unsafe(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise DataError(f"{target}: is a file; name a folder to write to")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{target}: is not empty; name another folder, or allow overwriting")
    for kept in (Path.cwd(), Path.home()):
        if target == kept or target in kept.parents:
            raise DataError(f"{target}: refused, overwriting it would delete {kept}")


def _reason(target: Path, error: OSError) -> str:
    if error.errno in _DISK_FULL:
        return (
            f"{target}: the disk is full (or a quota is reached); nothing was left behind, "
            "free some space and run it again"
        )
    return f"{target}: cannot be written ({error.strerror or error}); nothing was left behind"


# Temporary folders hold a lock while their process lives. The next one of their kind sweeps a
# folder whose lock was once taken by a process of this machine and is held by nobody now.
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
