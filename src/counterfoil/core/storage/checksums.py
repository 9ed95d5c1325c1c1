"""Checksums of a folder's files in `SHA256SUMS`, as ``sha256sum -c`` reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage.reading import digest_of, read_text

SUMS = "SHA256SUMS"
SUMS_BYTES = 1 << 20

STATE, STATE_SUM = "training_state.pt", "training_state.sha256"
"""Training state of a run beside the model, and its checksum; not in `SHA256SUMS`."""


def write_sums(folder: Path, names: Iterable[str] | None = None, sums: str = SUMS) -> None:
    """Write the checksums of the named files of a folder, or of all its files."""
    if names is None:
        files = (path for path in folder.rglob("*") if path.is_file() and path != folder / sums)
        names = [path.relative_to(folder).as_posix() for path in files]
    lines = [f"{digest_of(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / sums).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, without: Iterable[str] = (), sums: str = SUMS) -> None:
    """Verify the listed files, except those ``without``; refuse files that are not listed."""
    listed = read_sums(folder / sums)
    for name in _names_in(folder, listed):
        if name not in listed and name not in (sums, STATE, STATE_SUM):
            raise CheckpointError(
                f"{folder / name}: not in {sums}, so it was not saved with this model; remove it, "
                "or save the model again"
            )
    for name, expected in listed.items():
        if not (folder / name).exists():
            raise _incomplete(folder / name)
        if name not in without:
            _check(folder / name, expected)


def _names_in(folder: Path, listed: Iterable[str]) -> Iterator[str]:
    """Files of a folder, and subfolders that are links or hold no listed file."""
    parents = {parent.as_posix() for name in listed for parent in Path(name).parents}
    for root, folders, files in os.walk(folder):
        paths = [Path(root, name) for name in folders]
        unlisted = [p for p in paths if p.is_symlink() or _name(p, folder) not in parents]
        yield from (_name(path, folder) for path in (*unlisted, *(Path(root, f) for f in files)))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def check_sum(folder: Path, name: str, sums: str = SUMS) -> None:
    """Verify one file, which must be listed."""
    listed = read_sums(folder / sums)
    if name not in listed:
        raise CheckpointError(f"{folder / sums}: damaged (it has no checksum of {name})")
    _check(folder / name, listed[name])


def _check(path: Path, expected: str) -> None:
    try:
        actual = digest_of(path)
    except FileNotFoundError:
        raise _incomplete(path) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if actual != expected:
        raise CheckpointError(
            f"{path}: damaged or changed since it was saved (its SHA-256 is {actual[:16]}…, "
            f"expected {expected[:16]}…); copy it again, or save it again where it was made"
        )


def _incomplete(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: no such file: an incomplete model folder; copy it again")


def read_sums(path: Path) -> dict[str, str]:
    try:
        lines = read_text(path, SUMS_BYTES).splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: no {path.name}: an incomplete model folder, or one saved before "
            "checksums were; save or train it again"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    sums = {}
    for line in lines:
        parts = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if parts is None or Path(parts[2]).is_absolute() or ".." in Path(parts[2]).parts:
            raise CheckpointError(f"{path}: damaged (expected lines of a sum and a file's name)")
        sums[parts[2]] = parts[1]
    return sums
