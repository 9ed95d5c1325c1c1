"""Shards at an address: their table of contents is read once, their samples when they are needed.

Headers, captions and array headers of a shard are stored in the cache folder, by address, size and
stamp of the file. Images and features never are.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import GIB, JSON_BYTES, LINE_BYTES, read_text
from counterfoil.core.storage.remote import RemoteFile, check_url, expand_braces, safe_url
from counterfoil.data.formats.base import Draft
from counterfoil.data.formats.shards import (
    BOXES,
    FRAGMENTS,
    HEADER_BYTES,
    Entry,
    make_draft,
    read_entries,
    split_name,
)
from counterfoil.data.formats.tar_files import TarMember, read_members
from counterfoil.data.pairs import Problem, ProblemLog

FOLDER = "remote-shards"
"""Folder of the tables of contents in a cache folder."""

THREADS = 8
"""Shards whose contents are read at the same time."""

CONTENTS_BYTES = GIB
"""Captions and other small members of one shard."""


class _Contents(BaseModel):
    """The members of a shard (name, offset, size) and the bytes of the small ones, by offset."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: str
    size: int
    stamp: str
    members: list[tuple[str, int, int]]
    small: dict[str, str]


@dataclass(frozen=True)
class _Shard:
    file: RemoteFile
    members: list[TarMember]
    small: dict[int, bytes]
    problems: list[Problem]

    def content(self, member: TarMember, size: int | None = None) -> bytes:
        data = self.small[member.offset]
        return data[:size] if size else data


def read_remote_shards(url: str, log: ProblemLog, cache_dir: Path, progress: Progress) -> Draft:
    """The items of all shards that an address with braces names."""
    urls = expand_braces(url)
    for one in urls:
        check_url(one)
    entries: list[Entry] = []
    with ThreadPoolExecutor(min(THREADS, len(urls))) as pool:
        shards: Iterator[_Shard] = pool.map(lambda one: _read_shard(one, cache_dir), urls)
        for shard in progress.track(shards, "reading the contents of shards", len(urls)):
            log.problems += shard.problems
            entries += read_entries(shard.file, shard.members, shard.content, log)
    name = Path(safe_url(url)).name
    return make_draft(name, Path(name), entries, log)


def _read_shard(url: str, cache_dir: Path) -> _Shard:
    file = RemoteFile.open_url(url)
    key = hashlib.sha256(f"{url}\n{file.size}\n{file.stamp}".encode()).hexdigest()[:32]
    path = cache_dir / FOLDER / f"{key}.json"
    stored = _try_load(path, file) if file.stamp else None
    if stored is not None:
        return stored
    shard = _walk(file)
    if file.stamp and not shard.problems:  # they are not stored: each run is to report them
        with suppress(OSError):  # the next run reads the contents again
            write_atomically(path, _dump(shard))
    return shard


def _walk(file: RemoteFile) -> _Shard:
    """Read the headers of all members, and the small members whole."""
    log = ProblemLog()
    members: list[TarMember] = []
    small: dict[int, bytes] = {}
    total = 0
    for member in read_members(file, log):
        _, end = split_name(member.name)
        size = 0
        if end in ("json", "txt"):
            size = member.size if member.size <= LINE_BYTES else 0  # refused by `read_entries`
        elif end in (FRAGMENTS, BOXES):
            size = min(member.size, HEADER_BYTES)
        total += size + len(member.name)
        if total > CONTENTS_BYTES:
            log.fatal("large-shard", file, f"more than {CONTENTS_BYTES} bytes of captions")
            break
        members.append(member)
        data = file.read(member.offset, size) if size else b""
        small[member.offset] = _array_header(data) if end in (FRAGMENTS, BOXES) else data
    return _Shard(file, members, small, log.problems)


def _array_header(data: bytes) -> bytes:
    """The header at the start of a `.npy` file, without the numbers after it."""
    wide = data[6:7] != b"\x01"
    length = int.from_bytes(data[8 : 12 if wide else 10], "little")
    return data[: length + (12 if wide else 10)]


def _dump(shard: _Shard) -> str:
    file = shard.file
    small = {str(k): base64.b64encode(v).decode() for k, v in shard.small.items() if v}
    members = [(one.name, one.offset, one.size) for one in shard.members]
    contents = _Contents(
        url=file.url, size=file.size, stamp=file.stamp, members=members, small=small
    )
    text = contents.model_dump_json()
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _try_load(path: Path, file: RemoteFile) -> _Shard | None:
    """Stored contents of a file; None if there are none, or if they are damaged."""
    try:
        checksum, _, text = read_text(path, 2 * JSON_BYTES).partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            return None
        contents = _Contents.model_validate_json(text)
        small = {int(k): base64.b64decode(v, validate=True) for k, v in contents.small.items()}
    except (OSError, UnicodeError, ValidationError, ValueError, binascii.Error):
        return None
    if (contents.url, contents.size, contents.stamp) != (file.url, file.size, file.stamp):
        return None
    members = [TarMember(file, *one) for one in contents.members]
    if any(one.offset < 0 or one.size < 0 or one.offset + one.size > file.size for one in members):
        return None
    empty = {one.offset: b"" for one in members}
    return _Shard(file, members, {**empty, **small}, [])
