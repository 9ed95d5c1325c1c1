"""Atomic writes of files and folders, and temporary folders that are always removed.

A new file or folder appears in one step. Replacing a folder takes two renames: a kill between them
leaves the old folder beside its name, in ``.NAME.old.*``, and the next writer restores it first
(`replacing`).

Files and folders get the permissions of the user's umask (not the private ones of ``tempfile``).
Names are synced to disk before the next step.
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
from re import Pattern
from weakref import finalize

from counterfoil.core.errors import DataError
from counterfoil.core.storage.locks import LOCK, Holder, Lock, locked_target

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}


def home_folder() -> Path:
    """The user's home folder, or the current folder for a user without one (some containers)."""
    try:
        return Path.home()
    except RuntimeError:
        return Path()


DEFAULT_CACHE = home_folder() / ".cache" / "counterfoil"
"""Default folder of generated scenes, cached features and downloaded models."""
CACHE_VARIABLE = "COUNTERFOIL_CACHE"

SYNC_ALL_FROM = 500
"""Number of files above which one ``sync`` of everything is faster."""

ADVICE = "wait for it, or name another folder"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def default_cache() -> Path:
    """The folder that COUNTERFOIL_CACHE names at the time of the call, or `DEFAULT_CACHE`."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file in one step; its content is synced before its name appears.

    `OSError` for a folder, and for a device or a FIFO, which a rename would replace.
    """
    if problem := _wrong_kind(path):
        raise OSError(errno.EINVAL, problem, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("xb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(new, path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name
            del error.filename2  # None would be printed
        raise


def remove_unfinished(path: Path) -> None:
    """Delete what killed processes left of a file they were writing; the caller has its lock."""
    names = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{8}")
    for file in path.parent.iterdir():
        if names.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)


def file_obstacle(path: Path) -> str | None:
    """Why `write_atomically` could not write a file, and what to do; None if it probably can."""
    return _wrong_kind(path) or _parent_obstacle(path)


def _wrong_kind(path: Path) -> str | None:
    # these, unlike those of Path, do not raise below a folder that cannot be read
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a device or a FIFO"
        return f"is {kind}; name a file to write to"
    return None


def _parent_obstacle(path: Path) -> str | None:
    """Why nothing can be created at a path; folders that do not exist yet are no reason."""
    parents = Path(os.path.abspath(path)).parents
    nearest = next(parent for parent in parents if os.path.lexists(parent))
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder; name another path"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"the folder {nearest} is not writable; name another path"
    return None


def put_in_place(new: Path, path: Path) -> None:
    """Rename a finished file, link or folder, and sync its new name to disk."""
    os.replace(new, path)
    sync_folder(path.parent)
    if new.parent != path.parent:
        sync_folder(new.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; at the end of the block it replaces ``path``."""
    with replacing(path, "writing it"):
        new = _make_sibling(path, "new")
        try:
            yield new
            _share(new)
            sync_tree(new)
            replace_folder(new, path)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


@contextmanager
def replacing(path: Path, doing: str, advice: str = "wait for it, or stop it") -> Iterator[None]:
    """`locked_target` for a folder, after recovery from a killed process."""
    with locked_target(path, doing, advice) as works:
        if works:  # otherwise another process may be using the remains
            _recover(path)
        yield


def _recover(path: Path) -> None:
    """Restore an old folder that was moved aside but not replaced; delete all other remains."""
    remains = {kind: _siblings(path, kind) for kind in ("old", "new")}
    for folder in remains["old"]:
        older = folder / path.name
        if not os.path.lexists(path) and os.path.lexists(older):
            put_in_place(older, path)
    for folder in [*remains["old"], *remains["new"]]:
        shutil.rmtree(folder, ignore_errors=True)


def _siblings(path: Path, kind: str) -> list[Path]:
    """Folders of `_make_sibling`, the latest first."""
    names = re.compile(re.escape(f".{path.name}.{kind}.") + "[0-9a-f]{8}")
    folders = [
        folder
        for folder in path.parent.iterdir()
        if names.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
    ]
    return sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)


def _make_sibling(path: Path, kind: str) -> Path:
    """A new empty folder beside ``path``."""
    folder = path.with_name(f".{path.name}.{kind}.{secrets.token_hex(4)}")
    folder.mkdir()
    return folder


def replace_folder(new: Path, path: Path) -> None:
    """Rename a synced folder to ``path``; an older one there is deleted once it is replaced.

    The caller must hold the lock of ``path`` (`replacing`).
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
        if path.exists():  # never delete the only copy
            shutil.rmtree(old, ignore_errors=True)


def _share(folder: Path) -> None:
    """Give the files below a folder its permissions, as some libraries write private files."""
    mode = folder.stat().st_mode & 0o666
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink() and path.stat().st_mode & 0o777 != mode:
                path.chmod(mode)


def sync_tree(folder: Path) -> None:
    """Sync the files below a folder to disk, and their names."""
    if hasattr(os, "sync") and sum(len(names) for _, _, names in os.walk(folder)) > SYNC_ALL_FROM:
        os.sync()
        return
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                sync_file(path)
        sync_folder(Path(parent))


def sync_file(path: Path) -> None:
    """Sync a closed file to disk."""
    _sync(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, if the file system supports it."""
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
def staged_folder(
    target: Path, *, overwrite: bool, replaceable: Pattern[str] | None = None
) -> Iterator[Path]:
    """A temporary folder beside ``target`` that replaces it at the end of the block.

    On any error it is removed, and ``target`` is unchanged. Two processes cannot write to one
    ``target`` at the same time. ``replaceable``: see `check_folder_target`.
    """
    target = Path(os.path.abspath(target))
    check_folder_target(target, overwrite=overwrite, replaceable=replaceable)
    try:
        with replacing(target, "writing a data set there", ADVICE):
            # another process may have written it meanwhile
            _refuse_unsafe(target, overwrite, replaceable)
            with atomic_folder(target) as folder:
                yield folder
    except OSError as error:
        raise DataError(_reason(target, error)) from error


def check_folder_target(
    target: Path, *, overwrite: bool, replaceable: Pattern[str] | None = None
) -> None:
    """Refuse a folder that `staged_folder` could not write, before the work for it begins.

    A folder with a file whose name does not match ``replaceable`` is never replaced: its owner may
    not have another copy.
    """
    target = Path(os.path.abspath(target))
    _refuse_unsafe(target, overwrite, replaceable)
    if problem := _parent_obstacle(target):
        raise DataError(f"{target}: cannot be written: {problem}")


def _refuse_unsafe(target: Path, overwrite: bool, replaceable: Pattern[str] | None) -> None:
    if os.path.exists(target) and not os.path.isdir(target):
        raise DataError(f"{target}: is a file; name a folder to write to")
    if not os.path.isdir(target) or not any(target.iterdir()):
        return
    for folder in (Path.cwd(), Path.home()) if overwrite else ():
        if target == folder or target in folder.parents:
            raise DataError(f"{target}: refused, overwriting it would delete {folder}")
    names = sorted(os.listdir(target))
    strange = [n for n in names if replaceable is not None and not replaceable.fullmatch(n)]
    if strange:
        raise DataError(
            f"{target}: is not empty, and has '{strange[0]}', which is not part of a data set that "
            "could be written again; name another folder"
        )
    if not overwrite:
        raise DataError(
            f"{target}: is not empty; name another folder, or replace it with --overwrite"
        )


def _reason(target: Path, error: OSError) -> str:
    if error.errno in _DISK_FULL:
        return (
            f"{target}: the disk is full (or a quota is reached); nothing was left behind, "
            "free some space and run it again"
        )
    return f"{target}: cannot be written ({error.strerror or error}); nothing was left behind"


class Scratch:
    """A temporary folder, removed by `close` or at the end of the process.

    It is locked while its process lives. A new folder with the same prefix removes those that
    killed processes of this machine left.
    """

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
    if os.getpid() == pid:  # a forked process must not remove its parent's folder
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if _is_own_folder(folder) and _is_abandoned(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_own_folder(folder: Path) -> bool:
    """Whether it is a folder of this user, as a temporary folder may be shared."""
    status = folder.lstat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISDIR(status.st_mode) and is_own


def _is_abandoned(path: Path) -> bool:
    if not path.is_file():
        return False
    holder, is_held = Holder.read(path), Lock(path).is_held()
    if holder is None or holder.host != Holder.current().host:
        return False  # just being created, or by another machine that shares this folder
    return holder.is_gone if is_held is None else not is_held
