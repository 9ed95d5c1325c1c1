"""NumPy values in pickles, rebuilt from their bytes: numbers only, never objects."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = "biufc?"


class NumpyType:
    """Stands in for `numpy.dtype` while reading; knows plain numbers and nothing else."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in KINDS or self.dtype.fields is not None:
            raise UnpicklingError(f"Can only read NumPy numbers, but got a value of type {code!r}")

    def __setstate__(self, state: Any) -> None:
        if _bytes(state[1]) == b">":
            self.dtype = self.dtype.newbyteorder(">")


class NumpyArray:
    """Stands in for `numpy.ndarray` while reading."""

    def __init__(self) -> None:
        self.found: NDArray[Any] = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_column, data = state
        flat = np.frombuffer(_bytes(data), dtype=kind.dtype)
        self.found = flat.reshape(tuple(shape), order="F" if by_column else "C").copy()

    def array(self) -> NDArray[Any]:
        return self.found


def rebuild_array(*_: Any) -> NumpyArray:
    return NumpyArray()


def rebuild_scalar(kind: NumpyType, data: Any) -> Any:
    """A Python number."""
    return np.frombuffer(_bytes(data), dtype=kind.dtype, count=1)[0].item()


def _bytes(data: Any) -> bytes:
    """Python 2 wrote bytes as a string, which was read as Latin-1."""
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


NUMPY_GLOBALS: list[Any] = [
    (NumpyType, "numpy.dtype"),
    (NumpyArray, "numpy.ndarray"),
    *(
        entry
        for core in ("core", "_core")
        for entry in (
            (rebuild_array, f"numpy.{core}.multiarray._reconstruct"),
            (rebuild_scalar, f"numpy.{core}.multiarray.scalar"),
        )
    ),
]
"""What a pickle may name of NumPy, and what it gets instead."""
