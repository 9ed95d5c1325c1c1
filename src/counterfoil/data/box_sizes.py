"""The image sizes that go with boxes in pixels (`{split}_ims_size.npy`).

Our own files are plain numbers [images, 2]. GSMN's are pickled arrays of records with ``image_w``
and ``image_h``: those are read by an unpickler that can build numbers, arrays and inert records
and nothing else, so a hostile file is an error and never runs.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.data.arrays import ArrayError, check_shape, check_size
from counterfoil.reading import JSON_BYTES, open_regular

_SAFE_NUMPY = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}


def read_box_sizes(path: Path) -> NDArray[np.float32]:
    """Width and height of every image as float32 [images, 2]."""
    try:
        with open_regular(path, JSON_BYTES) as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
            if dtype.hasobject:
                sizes = _from_records(path, _Unpickler(file, encoding="latin1").load())
            else:
                check_shape(shape, dtype, str(path))
                check_size(path, shape, dtype, file.tell())
                file.seek(0)
                sizes = npy.read_array(file, allow_pickle=False)
    except pickle.UnpicklingError as error:
        raise ArrayError(f"{path}: refused: {error}", "unsafe-pickle") from None
    except ArrayError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
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


class _Record:
    """Stands in for whatever class was pickled; takes no arguments, so no call has an effect."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    if not (isinstance(cls, type) and issubclass(cls, _Record)) or state is not None:
        raise pickle.UnpicklingError("it builds something other than plain records")
    return _Record()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _SAFE_NUMPY:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        if (module, name) in {("copy_reg", "_reconstructor"), ("copyreg", "_reconstructor")}:
            return _reconstructor
        if module in {"builtins", "__builtin__"} and name != "object":
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return _inert(module, name)


def _inert(module: str, name: str) -> Any:
    """A class that can only be made without arguments, which is how plain records are pickled."""
    if name == "object":
        return object

    class Inert(_Record):
        def __new__(cls, *args: Any) -> Any:
            if args:
                raise pickle.UnpicklingError(f"it wants to call {module}.{name} with arguments")
            return _Record()

    return Inert


def _from_records(path: Path, records: Any) -> NDArray[Any]:
    def field(record: Any, key: str) -> float:
        value = record.get(key) if isinstance(record, dict) else getattr(record, key, None)
        if value is None:
            raise ArrayError(f"{path}: a record has no '{key}' (expected image_w and image_h)")
        return float(value)

    # A list of equal dictionaries is saved as an array; a single one as an array without axes.
    flat = np.asarray(records, dtype=object).reshape(-1)
    return np.array([[field(r, "image_w"), field(r, "image_h")] for r in flat]).reshape(-1, 2)
