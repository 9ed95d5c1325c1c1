"""Feature files of a split, read and written: `{split}_ims.npy` and those beside it.

`{split}_ims.npy`
    features, float [images, fragments, dim] or [images, dim]
`{split}_ims_lens.npy`
    number of fragments per image without padding, integers [images], if it varies
`{split}_ims_bbx.npy`
    boxes x1, y1, x2, y2, numbers [images, fragments, 4]
`{split}_ims_size.npy`
    width and height, numbers [images, 2], if the boxes are in pixels
`{split}_ims_made_by.txt`
    name of the extractor, if this library made the features
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.core.storage.arrays import ArrayError, ArrayFile, check_shape, check_size
from counterfoil.core.storage.reading import JSON_BYTES, open_regular
from counterfoil.data.formats.text_files import read_lines
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import ProblemLog
from counterfoil.data.pickle_values import (
    NUMPY_WITH_OBJECTS,
    PYTHON,
    Global,
    ObjectArray,
    PickleDamagedError,
    PickleRefusedError,
    StandIn,
    resolve,
)
from counterfoil.data.pickles import OPERATIONS, PickleReader

OPERATIONS_PER_RECORD = 60
"""Instructions per record; an object with two NumPy numbers takes about 40."""

FEATURES, LENGTHS, BOXES, SIZES = "_ims.npy", "_ims_lens.npy", "_ims_bbx.npy", "_ims_size.npy"
MADE_BY = "_ims_made_by.txt"


# This library writes sizes as numbers [images, 2]. GSMN's are pickled arrays of records with
# ``image_w`` and ``image_h``. `data.pickles` reads those as data, so a hostile file never runs.
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
    """Stands in for any pickled class."""

    def finish(self, content: Any) -> Any:
        """Its attributes, including those of ``__slots__``, which are pickled separately."""
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


def open_features(folder: Path, split: str, log: ProblemLog) -> FragmentTable | None:
    """The fragment table of a split; None if its files are missing or unusable."""
    path = folder / (split + FEATURES)
    features = _open(path, log)
    if features is None:
        return None
    if features.dtype.kind != "f":
        log.fatal("wrong-dtype", path, f"expected float features, found {features.dtype}")
        return None
    if len(features.shape) not in (2, 3) or 0 in features.shape[1:]:
        log.fatal(
            "wrong-shape",
            path,
            f"expected [images, fragments, dim] or [images, dim], found {features.shape}",
        )
        return None
    count = len(features)
    fragments = features.shape[1] if len(features.shape) == 3 else 1
    return FragmentTable(
        features=features,
        rows=np.arange(count, dtype=np.int64),
        lengths=_lengths(folder / (split + LENGTHS), count, fragments, log),
        boxes=(boxes := _boxes(folder / (split + BOXES), count, fragments, log)),
        sizes=_sizes(folder / (split + SIZES), count, boxes, log),
        made_by=_made_by(folder / (split + MADE_BY), log),
    )


def _made_by(path: Path, log: ProblemLog) -> str | None:
    lines = [line.strip() for _, line in read_lines(path, log)] if path.exists() else []
    return lines[0] if lines and lines[0] else None


def _open(path: Path, log: ProblemLog) -> ArrayFile | None:
    """The array of a file; None if there is no such file, or with the fault logged."""
    try:
        return ArrayFile(path) if path.exists() else None
    except ArrayError as error:
        log.fatal(error.kind, path, str(error).removeprefix(f"{path}: "))
        return None


def _lengths(path: Path, count: int, fragments: int, log: ProblemLog) -> NDArray[np.int64] | None:
    array = _open(path, log)
    if array is None:
        return None
    if array.shape != (count,) or array.dtype.kind not in "iu":
        log.fatal(
            "wrong-shape", path, f"expected {count} integers, found {array.dtype} {array.shape}"
        )
        return None
    lengths: NDArray[Any] = array.rows(range(count)).astype(np.int64)
    if count and not (lengths.min() >= 0 and lengths.max() <= fragments):
        log.fatal("wrong-shape", path, f"holds a count that is not within 0…{fragments}")
        return None
    return lengths


def _boxes(path: Path, count: int, fragments: int, log: ProblemLog) -> ArrayFile | None:
    boxes = _open(path, log)
    if boxes is None:
        return None
    if boxes.shape != (count, fragments, 4) or boxes.dtype.kind not in "fiu":
        log.fatal(
            "wrong-shape",
            path,
            f"expected boxes {(count, fragments, 4)}, found {boxes.dtype} {boxes.shape}",
        )
        return None
    return boxes


def _sizes(
    path: Path, count: int, boxes: ArrayFile | None, log: ProblemLog
) -> NDArray[np.float32] | None:
    if boxes is None:
        return None
    if not path.exists():
        if len(boxes) and float(np.max(boxes.row(0))) > 1.5:
            log.note(
                "boxes-without-sizes",
                boxes.path,
                f"the boxes are in pixels, but there is no {path.name} to scale them by",
            )
        return None
    try:
        sizes = read_box_sizes(path)
    except ArrayError as error:
        log.fatal(error.kind, path, str(error).removeprefix(f"{path}: "))
        return None
    if len(sizes) != count:
        log.fatal("count-mismatch", path, f"{len(sizes)} sizes for {count} images")
        return None
    return sizes


class ArrayWriter:
    """A `.npy` file of known shape, filled row by row."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.row_shape, self.dtype = shape[1:], dtype
        self._file: BinaryIO = path.open("wb")
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, header)

    def write(self, values: NDArray[Any]) -> None:
        """Append a row, padded with zeros along its first axis."""
        if values.shape != self.row_shape:
            padded = np.zeros(self.row_shape, dtype=self.dtype)
            padded[: len(values)] = values
            values = padded
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())

    def close(self) -> None:
        self._file.close()


class FeatureWriter:
    """Writes the feature files of a split; does nothing if it has no fragments."""

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

    def __exit__(self, *_: object) -> None:
        for array in self._arrays.values():
            array.close()
