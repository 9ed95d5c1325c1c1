"""Writing `.npy` files row by row, in any order and over several runs."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from counterfoil.data.arrays import ArrayFile
from counterfoil.errors import DataError


class RowWriter:
    """A `.npy` file of a known shape; a file of that shape is continued, any other replaced."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * self.dtype.itemsize
        self.continued = _matches(path, shape, self.dtype)
        if not self.continued:
            header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False}
            with path.open("wb") as file:
                npy.write_array_header_1_0(file, {**header, "shape": shape})
                file.truncate(file.tell() + shape[0] * self._row_bytes)
        self._offset = path.stat().st_size - shape[0] * self._row_bytes
        self._file = path.open("r+b")

    def write(self, start: int, rows: NDArray[Any]) -> None:
        """Put rows at ``start``, and make sure they are on disk."""
        self._file.seek(self._offset + start * self._row_bytes)
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _matches(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    try:
        found = ArrayFile(path)
    except DataError:
        return False
    return found.shape == shape and found.dtype == dtype
