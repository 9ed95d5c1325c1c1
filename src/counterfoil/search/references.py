"""Where an image's pixels are, as JSON, so that an index can find them again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from counterfoil.data.arrays import MAX_BYTES, ArrayFile
from counterfoil.data.images import FileImage, ImageRef, MemberImage, RowImage
from counterfoil.errors import DataError
from counterfoil.reading import IMAGE_PIXELS


def as_json(ref: ImageRef) -> dict[str, Any]:
    """What `as_image` makes an image of again; of an image elsewhere, its name."""
    if isinstance(ref, FileImage):
        return {"file": str(ref.path.resolve()), "name": ref.name}
    if isinstance(ref, RowImage):
        return {"array": str(ref.array.path.resolve()), "row": ref.row, "name": ref.name}
    if isinstance(ref, MemberImage):
        place = {"archive": str(ref.archive.resolve()), "offset": ref.offset, "size": ref.size}
        return {**place, "name": ref.name}
    return {"name": ref.name}


def as_image(tree: object) -> ImageRef:
    """An image from what `as_json` wrote; a `DataError` for anything else, opened or not.

    The file may come from elsewhere: types, places and sizes are checked before they are used.
    """
    if not isinstance(tree, dict):
        raise DataError("it is not known where this image's pixels are")
    name = tree.get("name")
    if name is not None and not isinstance(name, str):
        raise DataError("the name of an image is not text")
    if "file" in tree:
        return FileImage(_path(tree["file"]), name)
    if "array" in tree:
        return _row(ArrayFile(_path(tree["array"])), _number(tree.get("row")))
    if "archive" in tree:
        place = (_number(tree.get("offset")), _number(tree.get("size")))
        return MemberImage(_path(tree["archive"]), name or "image", *place)
    raise DataError("it is not known where this image's pixels are")


def _path(value: object) -> Path:
    try:
        if isinstance(value, str) and b"\0" not in os.fsencode(value):
            return Path(value)
    except UnicodeEncodeError:
        pass
    raise DataError("the place of an image is not a path")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise DataError(f"the place of an image: {value!r:.40} is no row, offset or size")
    return value


def _row(array: ArrayFile, row: int) -> RowImage:
    """A row of pictures; other arrays, and pictures that are too large, are refused unread."""
    shape = array.shape
    if array.dtype != "uint8" or len(shape) != 4 or shape[3] != 3 or row >= len(array):
        raise DataError(f"{array.path}: row {row} is no picture (shape {shape}, {array.dtype})")
    if shape[1] * shape[2] > IMAGE_PIXELS:
        raise DataError(f"{array.path}: pictures of {shape[1]} × {shape[2]} pixels are refused")
    return RowImage(array, row)
