"""A folder that appears complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterfoil.errors import DataError
from counterfoil.files import make_sibling, replace_folder, share, sync_tree
from counterfoil.locks import locked_target

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
        with locked_target(target, "writing a data set there", ADVICE):
            _refuse_unsafe(target, overwrite)  # another process may have been faster
            yield from _filled(target)
    except OSError as error:
        raise DataError(_reason(target, error)) from error


def _filled(target: Path) -> Iterator[Path]:
    staging = make_sibling(target, "part")
    try:
        yield staging
        share(staging)
        sync_tree(staging)
        replace_folder(staging, target)
    finally:
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


def _reason(target: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return (
            f"{target}: the disk is full (or a quota is reached); nothing was left behind, "
            "free some space and run it again"
        )
    return f"{target}: cannot be written ({error.strerror or error}); nothing was left behind"
