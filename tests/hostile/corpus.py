"""Hostile files: how each is made, the door it goes through, and the error that it must end in.

The files are made from code when a test needs them. `tests/hostile/test_corpus.py` sends each
through its door in one child process that measures time and memory.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.tiny import png

Content = bytes | str | dict | list | Callable[[Path], object]
Make = Callable[[Path], Path]

MIB = 2**20
QUICKLY = 1
"""The level of compression of the bombs."""


@dataclass(frozen=True)
class Case:
    """A hostile file: ``make`` writes it into an empty folder and returns what the door gets.

    ``error`` is the class of the error, or "skip" if the reader leaves the item out and goes on;
    ``phrase`` is part of the message, or of the listed problem.
    """

    name: str
    door: str
    make: Make
    error: str
    phrase: str


def files(contents: dict[str, Content], target: str = "") -> Make:
    """A folder of files; the door gets the folder, or ``target`` in it."""

    def make(folder: Path) -> Path:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(as_bytes(content))
        return folder / target

    return make


def file(name: str, content: Content) -> Make:
    """One file, which the door gets itself."""
    return files({name: content}, name)


def as_bytes(content: bytes | str | dict | list) -> bytes:
    if isinstance(content, bytes):
        return content
    text = content if isinstance(content, str) else json.dumps(content)
    return text.encode("utf-8", "surrogatepass")


# Contents that are wrong for any kind of file.


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def outside(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def subfolder(path: Path) -> None:
    path.mkdir()


def sparse(size: int) -> Callable[[Path], object]:
    """A file of zeros that takes no room on the disk."""

    def make(path: Path) -> None:
        with path.open("wb") as stream:
            stream.truncate(size)

    return make


def built(build: Callable[[], bytes]) -> Callable[[Path], object]:
    """Content that is slow to make: made when it is written, not at each collection."""
    return lambda path: path.write_bytes(build())


def gzip_bomb(size: int = 2 * 2**30) -> Callable[[Path], object]:
    """Two gigabytes of zeros in some kilobytes: members of a gzip file may follow each other."""
    return built(lambda: _gzip_member() * (size // (16 * MIB)))


@functools.cache
def _gzip_member() -> bytes:
    return gzip.compress(bytes(16 * MIB), QUICKLY)


def deep(opening: str, count: int = 100_000) -> str:
    return opening * count


# Arrays and pictures.


def npy(shape: str, descr: str = "'<f4'", data: bytes = bytes(64), version: int = 1) -> bytes:
    """A `.npy` file with any text as its shape and type."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(text)) + text + data


def array(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, rows: int = 0, more: bytes = b"") -> bytes:
    """A PNG that claims a size and has so many rows of it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(rows * (width + 1)), 1)
    parts = chunk(b"IHDR", head) + more + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, of any claimed length."""
    text = header if isinstance(header, bytes) else as_bytes(header)  # type: ignore[arg-type]
    return struct.pack("<Q", len(text) if length is None else length) + text + data


PICTURE = png()


def all_cases() -> list[Case]:
    from tests.hostile import data_files, model_files, other_files, packed_files, run_files

    modules = (data_files, packed_files, model_files, run_files, other_files)
    return [case for module in modules for case in module.CASES]
