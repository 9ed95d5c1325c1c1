"""Random access to uncompressed tar archives: members by byte range, and arrays as rows.

An archive is a file on disk, or a `RemoteFile`.
"""

from __future__ import annotations

import math
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import Descriptor, read_into
from counterfoil.core.storage.reading import open_regular
from counterfoil.core.storage.remote import RemoteFile
from counterfoil.data.pairs import ProblemLog

_BLOCK = 512
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}

MAX_OPEN_ARCHIVES = 16

Archive = Path | RemoteFile


@dataclass(frozen=True)
class TarMember:
    """Name and byte range of a file in an archive."""

    archive: Archive
    name: str
    offset: int
    size: int


def open_archive(archive: Archive) -> BinaryIO:
    """An archive as a stream that can seek."""
    return archive.open() if isinstance(archive, RemoteFile) else open_regular(archive)


def read_members(path: Archive, log: ProblemLog) -> Iterator[TarMember]:
    """The complete files of an archive; logs if the archive is cut short."""
    try:
        with open_archive(path) as file:
            total = file.seek(0, os.SEEK_END)
            file.seek(0)
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


def _walk(path: Archive, file: BinaryIO, total: int, log: ProblemLog) -> Iterator[TarMember]:
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.size < 0:
                    log.fatal("truncated-tar", path, f"{member.name}: a size of {member.size}")
                    return
                # TarFile stores every header; drop them to save memory.
                archive.members = []  # type: ignore[attr-defined]
                start = member.offset_data
                end = start + -(-member.size // _BLOCK) * _BLOCK if member.isreg() else start
                if start + (member.size if member.isreg() else 0) > total:
                    log.fatal("truncated-tar", path, f"ends inside {member.name}")
                    return
                if not (member.isreg() or member.isdir()) or member.issparse():
                    log.skip("not-a-file", path, f"{member.name}: a link, a device or sparse")
                elif member.isreg():
                    yield TarMember(path, member.name, start, member.size)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        log.fatal("truncated-tar", path, f"not a whole tar archive ({error})")
        return
    except EOFError:
        log.fatal("truncated-tar", path, "ends inside a header")
        return
    with open_archive(path) as again:
        again.seek(end)
        marker = again.read(_BLOCK)
    if len(marker) < _BLOCK or any(marker):
        log.fatal(
            "truncated-tar", path, f"has no end-of-archive mark at byte {end}: it was cut short"
        )


def archive_path(archive: Archive) -> Path:
    """The path of an archive; of a remote one only its name, for messages."""
    return Path(archive.name) if isinstance(archive, RemoteFile) else archive


@dataclass(frozen=True)
class ArrayMember:
    """Byte range, shape and dtype of the data of a `.npy` member."""

    archive: Archive
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class MemberRows:
    """Members [n, D] (n may differ) as rows [R, D] padded with zeros, or members [D] as rows [D].

    A member that is None is a row of zeros. Picklable and safe to share, as `ArrayFile` is.
    """

    def __init__(self, members: Sequence[ArrayMember | None]) -> None:
        self.members = members
        present = [member for member in members if member is not None]
        if not present:
            raise DataError("no array members to read")
        first = present[0]
        row_shape = first.shape
        if len(row_shape) == 2:
            row_shape = (max(member.shape[0] for member in present), first.shape[1])
        self.path = archive_path(first.archive)
        self.shape = (len(members), *row_shape)
        self.dtype = np.result_type(*{member.dtype for member in present})
        # result_type has native byte order; a single dtype must keep its own.
        if len({member.dtype.str for member in present}) == 1:
            self.dtype = first.dtype
        self._local = threading.local()

    def __len__(self) -> int:
        return len(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def lengths(self) -> NDArray[np.int64]:
        """Number of fragments per row, without padding."""
        single = len(self.shape) == 2
        counts = [0 if m is None else 1 if single else m.shape[0] for m in self.members]
        return np.array(counts, dtype=np.int64)

    def row(self, index: int) -> NDArray[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} shard members")
        member = self.members[index]
        if member is None:
            return np.zeros(self.shape[1:], dtype=self.dtype)
        stored = self._read(member)
        if stored.shape == self.shape[1:] and stored.dtype == self.dtype:
            return stored
        out = np.zeros(self.shape[1:], dtype=self.dtype)
        out[: len(stored)] = stored
        return out

    def rows(self, indices: Sequence[int]) -> NDArray[Any]:
        out = np.empty((len(indices), *self.shape[1:]), dtype=self.dtype)
        for position, index in enumerate(indices):
            out[position] = self.row(int(index))
        return out

    def _read(self, member: ArrayMember) -> NDArray[Any]:
        if isinstance(member.archive, RemoteFile):
            data = member.archive.read(member.offset, member.size)
            return np.frombuffer(data, dtype=member.dtype).reshape(member.shape)
        stored = np.empty(member.shape, dtype=member.dtype)
        if not read_into(stored, self._descriptor(member.archive), member.offset):
            raise DataError(f"{member.archive}: ends inside {member.name}")
        return stored

    def _descriptor(self, archive: Path) -> int:
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.pid = os.getpid()
            self._local.open = OrderedDict()
        opened: OrderedDict[Path, Descriptor] = self._local.open
        if archive not in opened:
            if len(opened) >= MAX_OPEN_ARCHIVES:
                opened.popitem(last=False)
            opened[archive] = Descriptor(archive)
        opened.move_to_end(archive)
        return opened[archive].fd
