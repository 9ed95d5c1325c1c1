"""Where an image's pixels are, as JSON, so that an index can find them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterfoil.data.arrays import ArrayFile
from counterfoil.data.images import FileImage, ImageRef, MemberImage, RowImage
from counterfoil.errors import DataError


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


def as_image(tree: dict[str, Any] | None) -> ImageRef:
    if tree and "file" in tree:
        return FileImage(Path(tree["file"]), tree["name"])
    if tree and "array" in tree:
        return RowImage(ArrayFile(tree["array"]), int(tree["row"]))
    if tree and "archive" in tree:
        return MemberImage(
            Path(tree["archive"]), tree["name"], int(tree["offset"]), int(tree["size"])
        )
    raise DataError("the index does not know where this image's pixels are")
