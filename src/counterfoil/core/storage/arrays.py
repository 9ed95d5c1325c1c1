"""Rows of large `.npy` files, read by offset without loading the file.

A memory map would be as fast, but its pages count as resident memory, and a truncated file kills
the process; a positioned read avoids both.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.storage.reading import open_descriptor, open_regular

MAX_AXES = 32
MAX_HEADER_BYTES = 10_000
"""Longest header that is read; numpy's own limit."""

MAX_BYTES = 2**62
"""Largest size of an array; numpy's own sizes are 64-bit."""


class ArrayError(DataError):
    """An array file that cannot be used; ``kind`` is the problem's name in reports."""

    def __init__(self, message: str, kind: str = "bad-array") -> None:
        super().__init__(message)
        self.kind = kind


class RowArray(Protocol):
    """Rows of equal shape, read on access: an `ArrayFile`, or members of shards."""

    @property
    def path(self) -> Path: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> NDArray[Any]: ...

    def rows(self, indices: Sequence[int]) -> NDArray[Any]: ...


class ArrayFile:
    """One `.npy` file, C order, opened for reading rows along its first axis.

    Safe to share between threads and forked workers, and picklable: the file is opened per process.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.shape, self.dtype, self._offset = _read_header(self.path)
        self._row_shape = self.shape[1:]
        self._row_bytes = math.prod(self._row_shape) * self.dtype.itemsize
        check_size(self.path, self.shape, self.dtype, self._offset)
        self._local = threading.local()

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def _descriptor(self) -> int:
        owner = getattr(self._local, "owner", None)
        if owner is None or owner.pid != os.getpid():
            owner = self._local.owner = Descriptor(self.path)
        return owner.fd

    def row(self, index: int) -> NDArray[Any]:
        """Row ``index`` as a new array of the file's dtype."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.path}, which has {len(self)}")
        out = np.empty(self._row_shape, dtype=self.dtype)
        if not read_into(out, self._descriptor(), self._offset + index * self._row_bytes):
            raise DataError(f"{self.path}: ends inside row {index}; was it changed meanwhile?")
        return out

    def head(self, index: int, size: int = 4096) -> bytes:
        """The first bytes of a row, enough to distinguish most rows."""
        size = min(size, self._row_bytes)
        return os.pread(self._descriptor(), size, self._offset + index * self._row_bytes)

    def whole(self) -> NDArray[Any]:
        """All rows at once."""
        out = np.empty(self.shape, dtype=self.dtype)
        if not read_into(out, self._descriptor(), self._offset):
            raise DataError(f"{self.path}: ends early; was it changed meanwhile?")
        return out

    def rows(self, indices: Sequence[int]) -> NDArray[Any]:
        out = np.empty((len(indices), *self._row_shape), dtype=self.dtype)
        for position, index in enumerate(indices):
            out[position] = self.row(int(index))
        return out


def read_into(out: NDArray[Any], descriptor: int, offset: int) -> bool:
    """Fill an array from a file's bytes; False if the file ends first."""
    buffer = out.reshape(-1).view(np.uint8).data if out.size else memoryview(b"")
    position = 0
    while position < len(buffer):
        count = os.preadv(descriptor, [buffer[position:]], offset + position)
        if count == 0:
            return False
        position += count
    return True


class Descriptor:
    """A file descriptor that is closed with the object, in the process that opened it."""

    pid = 0  # of no process: there is nothing to close if the file cannot be opened

    def __init__(self, path: Path) -> None:
        self.fd = open_descriptor(path)
        self.pid = os.getpid()

    # Defaults, since `os` may be gone when an interpreter that ends deletes what is left.
    def __del__(
        self, getpid: Callable[[], int] = os.getpid, close: Callable[[int], None] = os.close
    ) -> None:
        if self.pid == getpid():
            close(self.fd)


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    try:
        with open_regular(path) as file:
            return parse_header(file, str(path))
    except FileNotFoundError:
        raise ArrayError(f"{path}: no such file", "missing-file") from None
    except OSError as error:
        raise ArrayError(f"{path}: cannot be read ({error.strerror})") from None


def parse_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and offset of the data of a `.npy` stream of plain numbers in C order."""
    try:
        version = npy.read_magic(file)
        _check_header_length(file, version)
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = reader(file)
    except OSError:
        raise
    except Exception as error:  # a damaged header is a damaged Python literal: any error
        raise ArrayError(f"{name}: not a readable .npy file ({error})") from None
    if dtype.hasobject:
        raise ArrayError(
            f"{name}: holds Python objects, which are not loaded; save plain numbers", "wrong-dtype"
        )
    if dtype.fields is not None or dtype.subdtype is not None or not dtype.itemsize:
        raise ArrayError(f"{name}: holds {dtype}, expected plain numbers", "wrong-dtype")
    if fortran and len(shape) > 1:
        raise ArrayError(f"{name}: stored in Fortran order; save it with np.ascontiguousarray")
    if not shape:
        raise ArrayError(f"{name}: holds a single number, expected rows", "wrong-shape")
    check_shape(shape, dtype, name)
    return shape, dtype, file.tell()


def _check_header_length(file: BinaryIO, version: tuple[int, int]) -> None:
    """Refuse an unknown version, and a header of gigabytes before memory is taken for it."""
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version[0]}.{version[1]}, expected 1.0, 2.0 or 3.0")
    start, width = file.tell(), 2 if version == (1, 0) else 4
    length = int.from_bytes(file.read(width), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read")
    file.seek(start)


def check_shape(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    """Refuse impossible shapes, and rows without numbers."""
    sides = [side for side in shape if side]
    if len(shape) > MAX_AXES or min(shape) < 0 or math.prod(sides) * dtype.itemsize > MAX_BYTES:
        text = str(shape) if len(shape) <= MAX_AXES else f"of {len(shape)} axes"
        raise ArrayError(f"{name}: impossible shape {_short(text)}", "wrong-shape")
    if shape[0] and 0 in shape[1:]:
        raise ArrayError(f"{name}: the shape {shape} has rows without numbers", "wrong-shape")


def check_size(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> None:
    """Refuse a file that is shorter than its header promises."""
    expected = offset + math.prod(shape) * dtype.itemsize
    actual = path.stat().st_size
    if actual < expected:
        raise ArrayError(
            f"{path}: truncated: {actual} bytes, but its header promises {expected} "
            f"(shape {shape}, {dtype}); copy or download it again",
            "truncated-array",
        )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"
