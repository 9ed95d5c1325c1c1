"""Rows of large `.npy` files, read by position: opening costs a header, training costs a batch.

A memory map would do the same for speed, but its touched pages count as resident memory and a file
cut short under it kills the process; a positioned read does neither.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.errors import DataError


class ArrayFile:
    """One `.npy` file, C order, opened for reading rows along its first axis.

    Safe to share between threads and forked workers, and picklable: the file is opened per process.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.shape, self.dtype, self._offset = _read_header(self.path)
        self._row_shape = self.shape[1:]
        self._row_bytes = int(np.prod(self._row_shape, dtype=np.int64)) * self.dtype.itemsize
        expected = self._offset + self._row_bytes * self.shape[0]
        actual = self.path.stat().st_size
        if actual < expected:
            raise DataError(
                f"{self.path}: truncated: {actual} bytes, but its header promises {expected} "
                f"(shape {self.shape}, {self.dtype}); copy or download it again"
            )
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
            owner = self._local.owner = _Descriptor(self.path)
        return owner.fd

    def row(self, index: int) -> NDArray[Any]:
        """Row ``index`` as a new array of the file's dtype."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.path}, which has {len(self)}")
        out = np.empty(self._row_shape, dtype=self.dtype)
        buffer = memoryview(out.reshape(-1).view(np.uint8)) if out.size else memoryview(b"")
        start = self._offset + index * self._row_bytes
        got = 0
        while got < self._row_bytes:
            count = os.preadv(self._descriptor(), [buffer[got:]], start + got)
            if count == 0:
                raise DataError(f"{self.path}: ends inside row {index}; was it changed meanwhile?")
            got += count
        return out

    def rows(self, indices: Sequence[int]) -> NDArray[Any]:
        out = np.empty((len(indices), *self._row_shape), dtype=self.dtype)
        for position, index in enumerate(indices):
            out[position] = self.row(int(index))
        return out


class _Descriptor:
    """A file descriptor that closes with the object, and knows the process that opened it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.pid = os.getpid()

    def __del__(self) -> None:
        if self.pid == os.getpid():
            os.close(self.fd)


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    try:
        with path.open("rb") as file:
            version = npy.read_magic(file)
            reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = reader(file)
            offset = file.tell()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: not a readable .npy file ({error})") from None
    if dtype.hasobject:
        raise DataError(f"{path}: holds Python objects, which are not loaded; save plain numbers")
    if fortran:
        raise DataError(f"{path}: stored in Fortran order; save it with np.ascontiguousarray")
    if not shape:
        raise DataError(f"{path}: holds a single number, expected rows")
    return shape, dtype, offset
