"""Writes the fragment files of a split row by row, in the layout that `feature_files` reads."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.data.fragments import FragmentTable
from counterfoil.data.sources.feature_files import BOXES, FEATURES, LENGTHS, MADE_BY, SIZES


class ArrayWriter:
    """A `.npy` file of known shape, filled row by row."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.row_shape, self.dtype = shape[1:], dtype
        self._file: BinaryIO = path.open("wb")
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, header)

    def write(self, values: NDArray[Any]) -> None:
        """Append a row; what it lacks along the first axis is filled with zeros."""
        if values.shape != self.row_shape:
            padded = np.zeros(self.row_shape, dtype=self.dtype)
            padded[: len(values)] = values
            values = padded
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())

    def close(self) -> None:
        self._file.close()


class FeatureWriter:
    """The files of one split's fragments; does nothing where there are none."""

    def __init__(self, folder: Path, split: str, table: FragmentTable | None) -> None:
        self.table = table
        self._arrays: dict[str, ArrayWriter] = {}
        if table is None:
            return
        count, fragments = len(table), table.max_fragments
        if table.made_by is not None:
            (folder / (split + MADE_BY)).write_bytes(f"{table.made_by}\n".encode())

        def open_array(end: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
            self._arrays[end] = ArrayWriter(folder / (split + end), (count, *shape), dtype)

        open_array(FEATURES, tuple(table.features.shape[1:]), table.features.dtype)
        if table.lengths is not None:
            open_array(LENGTHS, (), np.dtype(np.int64))
        if table.boxes is not None:
            open_array(BOXES, (fragments, 4), table.boxes.dtype)
            if table.sizes is not None:
                open_array(SIZES, (2,), np.dtype(np.float32))

    def write(self, image: int) -> None:
        if self.table is None:
            return
        stored = self.table.stored(image)
        self._arrays[FEATURES].write(stored.features)
        if LENGTHS in self._arrays and self.table.lengths is not None:
            self._arrays[LENGTHS].write(self.table.lengths[self.table.rows[image]])
        if stored.boxes is not None:
            self._arrays[BOXES].write(stored.boxes)
            if stored.size is not None:
                self._arrays[SIZES].write(stored.size)

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for array in self._arrays.values():
            array.close()
