"""A plain folder of photos, without captions, as a data set to take features from."""

from __future__ import annotations

import os
from pathlib import Path

from counterfoil.data.images import FileImage
from counterfoil.data.pairs import Pairs, Split
from counterfoil.errors import DataError

TYPES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif"}
)


def is_photo_folder(path: Path) -> bool:
    """Whether a folder, or one below it, has a file that is named like an image."""
    return path.is_dir() and any(_is_photo(name) for _, _, names in os.walk(path) for name in names)


def read_photos(folder: Path, split: str = "all") -> Pairs:
    """Every image in a folder and below it, in the order of their paths, which are their ids."""
    found = [
        Path(parent) / name
        for parent, _, names in os.walk(folder)
        for name in names
        if _is_photo(name)
    ]
    paths = sorted(found, key=lambda path: path.relative_to(folder).as_posix())
    if not paths:
        raise DataError(f"{folder}: no images (looked for {', '.join(sorted(TYPES))})")
    ids = [path.relative_to(folder).as_posix() for path in paths]
    pixels = [FileImage(path) for path in paths]
    return Pairs(folder.resolve().name, {split: Split(split, ids, [[] for _ in ids], pixels)})


def _is_photo(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in TYPES
