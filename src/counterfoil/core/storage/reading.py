"""Reading files that users name: regular files only, and no more of them than a limit.

A FIFO would block and a device such as /dev/zero would never end. The type is checked on the open
file, so nothing can be exchanged in between. Every refusal is an `OSError` whose ``strerror`` is a
sentence, so callers report it as they report a file that cannot be read.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KIB, MIB, GIB = 2**10, 2**20, 2**30

RECIPE_BYTES = 256 * KIB
"""A recipe or another YAML file. The longest of ours has 4 KiB."""

JSON_BYTES = GIB
"""A file that is read as a whole: JSON, ids, a vocabulary. COCO's captions have 150 MB."""

LINES_BYTES = 4 * GIB
"""A file of captions that is read line by line: text, CSV, TSV, JSON Lines, Parquet."""

LINE_BYTES = 16 * MIB
"""One line of such a file, and one JSON or text member of a shard."""

VECTORS_BYTES = 4 * GIB
"""Word vectors in an .npz, once decompressed. GloVe's largest have 2.7 GB."""

IMAGE_BYTES = 256 * MIB
"""One encoded image."""

IMAGE_PIXELS = 110_000_000
"""Width times height of an image as decoded, checked before. Medium format reaches 102 million."""

ANIMATION_PIXELS = 64_000_000
"""Of a WebP or AVIF: their decoders hold several copies of a frame."""

JPEG_PIXELS = 256_000_000
"""Of a JPEG in one scan, as stored: above `IMAGE_PIXELS` it is decoded at half its sides or less.
Phones reach 200 million."""

# O_NONBLOCK lets the open of a FIFO return at once; O_NOCTTY keeps a terminal from taking over.
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
    """A descriptor of a regular file, for reading; `OSError` for anything else, without waiting."""
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
    """A regular file, open for reading bytes; `OSError` if it is not one or above ``limit``."""
    file = os.fdopen(open_descriptor(path), "rb")
    size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        file.close()
        raise _too_large(path, _shown(size), limit)
    return file


@contextmanager
def open_text(path: str | Path, limit: int | None = None) -> Iterator[io.TextIOWrapper]:
    """A regular UTF-8 file as text, with its line ends as they are; for `csv.reader`."""
    with io.TextIOWrapper(open_regular(path, limit), encoding="utf-8", newline="") as file:
        yield file


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The whole of a regular file that has at most ``limit`` bytes."""
    with open_regular(path, limit) as file:
        # Python reserves as much memory as it is asked to read: no more than the file has.
        expected = min(limit, os.fstat(file.fileno()).st_size) + 1
        data = file.read(expected)
        if len(data) == expected:  # it grew since it was opened, or its size is unknown (/proc)
            data = b"".join([data, *_read_rest(file, limit - len(data))])
    if len(data) > limit:
        raise _too_large(path, f"more than {_shown(limit)}", limit)
    return data


def _read_rest(file: BinaryIO, left: int) -> Iterator[bytes]:
    """What follows in an open file, in pieces; it ends above ``left`` bytes."""
    while left >= 0 and (piece := file.read(min(MIB, left + 1))):
        left -= len(piece)
        yield piece


def read_text(path: str | Path, limit: int = JSON_BYTES) -> str:
    """The whole of a regular UTF-8 file, line ends as \\n."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, limit)), encoding="utf-8").read()


def read_lines(file: BinaryIO, path: str | Path, limit: int = LINE_BYTES) -> Iterator[bytes]:
    """Lines of an open file with their ends; `OSError` at one that is longer than ``limit``."""
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise OSError(
                errno.EFBIG, f"a line of more than {_shown(limit)}: not a file of lines", str(path)
            )
        yield line


def _too_large(path: str | Path, size: str, limit: int) -> OSError:
    sentence = f"too large: {size}, at most {_shown(limit)} of such a file are read"
    return OSError(errno.EFBIG, sentence, str(path))


def _shown(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
