"""A folder that appears complete or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterfoil.errors import DataError
from counterfoil.files import atomic_folder, replacing

ADVICE = "wait for it, or name another folder"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
    if error.errno in _FULL:
        return (
            f"{target}: the disk is full (or a quota is reached); nothing was left behind, "
            "free some space and run it again"
        )
    return f"{target}: cannot be written ({error.strerror or error}); nothing was left behind"
