"""The image sizes that go with boxes in pixels (`{split}_ims_size.npy`).

Our own files are plain numbers [images, 2]. GSMN's are pickled arrays of records with ``image_w``
and ``image_h``: those are read as data (see `data.pickles`), so a hostile file is an error and
never runs.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.data.arrays import ArrayError, check_shape, check_size
from counterfoil.data.pickle_globals import NUMPY_WITH_OBJECTS, PYTHON, ObjectArray
from counterfoil.data.pickle_values import (
    Global,
    PickleDamagedError,
    PickleRefusedError,
    StandIn,
    resolve,
)
from counterfoil.data.pickles import OPERATIONS, PickleReader
from counterfoil.reading import JSON_BYTES, open_regular

OPERATIONS_PER_RECORD = 60
"""A record of a class with two NumPy numbers takes about 40."""


def read_box_sizes(path: Path) -> NDArray[np.float32]:
    """Width and height of every image as float32 [images, 2]."""
    try:
        with open_regular(path, JSON_BYTES) as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
            if not shape:
                raise ArrayError(
                    f"{path}: expected numbers [images, 2] (width, height), found a single value",
                    "wrong-shape",
                )
            if dtype.hasobject:
                sizes = _from_records(path, _read_records(file, prod(shape)))
            else:
                check_shape(shape, dtype, str(path))
                check_size(path, shape, dtype, file.tell())
                file.seek(0)
                sizes = npy.read_array(file, allow_pickle=False)
    except PickleRefusedError as error:
        raise ArrayError(
            f"{path}: refused: {error}; expected records with image_w and image_h "
            "(nothing was run)",
            "unsafe-pickle",
        ) from None
    except ArrayError:
        raise
    except Exception as error:  # a damaged file may fail anywhere
        raise ArrayError(f"{path}: not a readable array of image sizes ({error})") from None
    if sizes.ndim != 2 or sizes.shape[1] != 2 or sizes.dtype.kind not in "fiu":
        raise ArrayError(
            f"{path}: expected numbers [images, 2] (width, height), found {sizes.dtype} "
            f"{sizes.shape}",
            "wrong-shape",
        )
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise ArrayError(f"{path}: holds a width or height that is not a positive number")
    return sizes.astype(np.float32)


class _Record(StandIn):
    """Stands in for whatever class was pickled."""

    def finish(self, content: Any) -> Any:
        """Its attributes; those of ``__slots__`` are pickled beside the others."""
        parts = content if isinstance(content, tuple) else (content,)
        return {
            key: value for part in parts if isinstance(part, dict) for key, value in part.items()
        }


def _find(name: str) -> Global | None:
    known = PYTHON.get(name) or NUMPY_WITH_OBJECTS.get(name)
    if known is not None or name.startswith("builtins."):
        return known

    def make(*arguments: Any) -> _Record:
        if arguments:
            raise PickleRefusedError(f"it wants to call {name!r} with arguments")
        return _Record()

    return Global(name, make)


def _read_records(file: BinaryIO, count: int) -> ObjectArray:
    end = os.fstat(file.fileno()).st_size
    operations = min(OPERATIONS + OPERATIONS_PER_RECORD * max(0, count), 10 * OPERATIONS)
    raw = PickleReader(file, end, _find, operations=operations).load()
    records = resolve(raw, frozenset(), 4 * operations)
    if not isinstance(records, ObjectArray):
        raise PickleDamagedError("its header says objects, but it holds none")
    return records


def _from_records(path: Path, records: ObjectArray) -> NDArray[np.float64]:
    def side(record: Any, key: str) -> float:
        value = record.get(key) if isinstance(record, dict) else None
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        try:
            return float(value if isinstance(value, (int, float, str)) else "")
        except ValueError:
            raise ArrayError(
                f"{path}: a record has no number '{key}' (expected image_w and image_h)"
            ) from None

    rows = [[side(record, "image_w"), side(record, "image_h")] for record in records]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)
