"""Members of an uncompressed tar archive by byte range, found in one pass over its headers."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from counterfoil.data.problems import ProblemLog
from counterfoil.reading import open_regular

_BLOCK = 512
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class TarMember:
    """Name and byte range of a file in an archive."""

    archive: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open_regular(self.archive) as file:
            file.seek(self.offset)
            return file.read(self.size)


def read_members(path: Path, log: ProblemLog) -> Iterator[TarMember]:
    """The files of an archive that are there as a whole; a cut is logged where it is met."""
    try:
        with open_regular(path) as file:
            total = os.fstat(file.fileno()).st_size
            magic = file.read(2)
            if magic in _COMPRESSED:
                log.fatal(
                    "compressed-shard",
                    path,
                    f"compressed with {_COMPRESSED[magic]}; members of shards are read in place, "
                    "so decompress it first",
                )
                return
            file.seek(0)
            yield from _walk(path, file, total, log)
    except OSError as error:
        log.fatal("unreadable-file", path, f"cannot be read ({error.strerror})")


def _walk(path: Path, file: BinaryIO, total: int, log: ProblemLog) -> Iterator[TarMember]:
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.size < 0:
                    log.fatal("truncated-tar", path, f"{member.name}: a size of {member.size}")
                    return
                # The archive keeps every header it has seen; a stream does not need them.
                archive.members = []  # type: ignore[attr-defined]
                start = member.offset_data
                end = start + -(-member.size // _BLOCK) * _BLOCK if member.isreg() else start
                if start + (member.size if member.isreg() else 0) > total:
                    log.fatal("truncated-tar", path, f"ends inside {member.name}")
                    return
                if member.isreg() and not member.issparse():
                    yield TarMember(path, member.name, start, member.size)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        log.fatal("truncated-tar", path, f"not a whole tar archive ({error})")
        return
    except EOFError:
        log.fatal("truncated-tar", path, "ends inside a header")
        return
    with open_regular(path) as again:
        again.seek(end)
        marker = again.read(_BLOCK)
    if len(marker) < _BLOCK or any(marker):
        log.fatal(
            "truncated-tar", path, f"has no end-of-archive mark at byte {end}: it was cut short"
        )
