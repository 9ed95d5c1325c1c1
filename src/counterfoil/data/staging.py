"""A folder that appears complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterfoil.errors import DataError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def staged_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when all went well.

    On any error it is removed, and what was at ``target`` is untouched.
    """
    target = Path(os.path.abspath(target))
    _refuse_unsafe(target, overwrite)
    staging = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = _sibling(target, ".part")
        # mkdtemp makes private folders; the result is an ordinary one.
        staging.chmod(0o777 & ~_umask())
        yield staging
        _swap(staging, target)
    except OSError as error:
        raise DataError(_reason(target, error)) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


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


def _swap(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    old = _sibling(target, ".old")
    target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(target: Path, suffix: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=suffix, dir=target.parent))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _reason(target: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return (
            f"{target}: the disk is full (or a quota is reached); nothing was left behind, "
            "free some space and run it again"
        )
    return f"{target}: cannot be written ({error.strerror or error}); nothing was left behind"
