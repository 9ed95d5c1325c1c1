"""Writing so that a kill or a full disk at any moment leaves the old state or the new one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file in one step; its content is on the disk before its name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; it takes its place, and that of an older one, when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    try:
        yield new
        for file in new.rglob("*"):
            if file.is_file():
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
        new.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            os.replace(path, old / path.name)
            os.replace(new, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
