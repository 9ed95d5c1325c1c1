"""Safe reading of files that users name: regular files only, up to a size limit.

A FIFO would block, and a device such as /dev/zero never ends. The type is checked on the open
file, so it cannot be replaced in between. Every refusal is an `OSError` whose ``strerror`` is a
sentence, so callers report it like any unreadable file.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KIB, MIB, GIB = 2**10, 2**20, 2**30

RECIPE_BYTES = 256 * KIB
"""A recipe or another YAML file. The longest of ours has 4 KiB."""

JSON_BYTES = GIB
"""A file read as a whole: JSON, ids, a vocabulary. COCO's captions have 150 MB."""

LINES_BYTES = 4 * GIB
"""A file of captions read line by line: text, CSV, TSV, JSON Lines, Parquet."""

LINE_BYTES = 16 * MIB
"""One line of such a file, and one JSON or text member of a shard."""

VECTORS_BYTES = 4 * GIB
"""Word vectors in an .npz, once decompressed. GloVe's largest have 2.7 GB."""

IMAGE_BYTES = 256 * MIB
"""One encoded image."""

IMAGE_PIXELS = 110_000_000
"""Pixels of a decoded image, checked before decoding. Medium format reaches 102 million."""

ANIMATION_PIXELS = 64_000_000
"""Pixels of a WebP or AVIF; their decoders hold several copies of a frame."""

JPEG_PIXELS = 256_000_000
"""Pixels of a JPEG in one scan, as stored; above `IMAGE_PIXELS` it is decoded at half its sides or
less. Phones reach 200 million."""

GZIP_BYTES, GZIP_RATIO = 16 * MIB, 100
"""Unpacked bytes of a gzip file, and above that, per byte: text reaches 20, a bomb 1,000."""

# O_NONBLOCK: opening a FIFO returns at once; O_NOCTTY: a terminal does not take control.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
)
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_descriptor(path: str | Path) -> int:
    """A descriptor of a regular file for reading; `OSError` for other types, without blocking."""
    descriptor = os.open(path, _FLAGS)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file", str(path))
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "something else")
            raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """A regular file, open for reading bytes; `OSError` for another type or above ``limit``."""
    file = os.fdopen(open_descriptor(path), "rb")
    size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        file.close()
        raise _too_large(path, _size_text(size), limit)
    return file


@contextmanager
def open_text(path: str | Path, limit: int | None = None) -> Iterator[io.TextIOWrapper]:
    """A regular UTF-8 file as text with its original line ends, for `csv.reader`."""
    with io.TextIOWrapper(open_regular(path, limit), encoding="utf-8", newline="") as file:
        yield file


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes."""
    with open_regular(path, limit) as file:
        # Python allocates the requested size at once: request no more than the file has.
        expected = min(limit, os.fstat(file.fileno()).st_size) + 1
        data = file.read(expected)
        if len(data) == expected:  # it grew since it was opened, or its size is unknown (/proc)
            data = b"".join([data, *_read_rest(file, limit - len(data))])
    if len(data) > limit:
        raise _too_large(path, f"more than {_size_text(limit)}", limit)
    return data


def read_unpacked(path: str | Path, limit: int) -> bytes:
    """The content of a regular file, unpacked if it is a gzip file, of at most ``limit`` bytes."""
    packed = io.BytesIO(read_bytes(path, limit))
    if packed.getvalue()[:2] != b"\x1f\x8b":
        return packed.getvalue()
    pieces, size = list[bytes](), 0
    try:
        with gzip.GzipFile(fileobj=packed) as file:
            while piece := file.read(MIB):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise _too_large(path, f"more than {_size_text(limit)} once unpacked", limit)
                if size > max(GZIP_BYTES, GZIP_RATIO * packed.tell()):
                    sentence = f"unpacks to more than {GZIP_RATIO} times its size: not a text file"
                    raise OSError(errno.EFBIG, sentence, str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"not a whole gzip file: {error}", str(path)) from None
    return b"".join(pieces)


def digest_of(path: Path) -> str:
    """SHA-256 of a regular file."""
    digest, buffer = hashlib.sha256(), bytearray(MIB)
    with open_regular(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _read_rest(file: BinaryIO, left: int) -> Iterator[bytes]:
    """The rest of an open file in pieces, up to just above ``left`` bytes."""
    while left >= 0 and (piece := file.read(min(MIB, left + 1))):
        left -= len(piece)
        yield piece


def read_text(path: str | Path, limit: int = JSON_BYTES) -> str:
    """The text of a regular UTF-8 file, with line ends as \\n."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, limit)), encoding="utf-8").read()


def read_lines(file: BinaryIO, path: str | Path, limit: int = LINE_BYTES) -> Iterator[bytes]:
    """Lines of an open file with their ends; `OSError` for a line above ``limit``."""
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise OSError(
                errno.EFBIG,
                f"a line of more than {_size_text(limit)}: not a file of lines",
                str(path),
            )
        yield line


def _too_large(path: str | Path, size: str, limit: int) -> OSError:
    sentence = f"too large: {size}, at most {_size_text(limit)} of such a file are read"
    return OSError(errno.EFBIG, sentence, str(path))


def _size_text(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
