"""SHA-256 of the files of a saved model, kept beside them: a flipped byte is found on reading.

The lists have the form of `sha256sum`, so ``sha256sum -c SHA256SUMS`` checks them as well. They are
written into a folder before it takes its name, so files and sums are always of the same save.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from counterfoil.errors import CheckpointError

SUMS = "SHA256SUMS"


def write_sums(folder: Path, names: Iterable[str] | None = None, sums: str = SUMS) -> None:
    """Write the sums of some files of a folder, or of all that are in it."""
    if names is None:
        files = (path for path in folder.rglob("*") if path.is_file() and path != folder / sums)
        names = [path.relative_to(folder).as_posix() for path in files]
    lines = [f"{digest_of(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / sums).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, without: Iterable[str] = (), sums: str = SUMS) -> None:
    """Compare all files on the list, except those ``without``, with their sums."""
    for name, expected in _read_sums(folder / sums).items():
        if name not in without:
            _check(folder / name, expected)


def check_sum(folder: Path, name: str, sums: str = SUMS) -> None:
    """Compare one file, which must be on the list."""
    listed = _read_sums(folder / sums)
    if name not in listed:
        raise CheckpointError(f"{folder / sums}: damaged (there is no sum of {name})")
    _check(folder / name, listed[name])


def digest_of(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _check(path: Path, expected: str) -> None:
    try:
        found = digest_of(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; what was saved is not whole") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if found != expected:
        raise CheckpointError(
            f"{path}: damaged or changed since it was saved (its SHA-256 is {found[:16]}…, saved "
            f"was {expected[:16]}…); copy it again, or save it again where it was made"
        )


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; what was saved is not whole") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    found = {}
    for line in lines:
        parts = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if parts is None or Path(parts[2]).is_absolute() or ".." in Path(parts[2]).parts:
            raise CheckpointError(f"{path}: damaged (expected lines of a sum and a file's name)")
        found[parts[2]] = parts[1]
    return found
