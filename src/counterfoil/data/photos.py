"""Folders of photos without captions."""

from __future__ import annotations

import os
from pathlib import Path

from counterfoil.core.errors import DataError
from counterfoil.core.storage.remote import is_url
from counterfoil.data.formats import sources
from counterfoil.data.formats.image_files import ENDINGS, short_names
from counterfoil.data.images import FileImage
from counterfoil.data.load import is_named
from counterfoil.data.pairs import Pairs, Split


def is_photo(name: str) -> bool:
    """Whether a file name has the ending of an image, and is not hidden."""
    return not name.startswith(".") and Path(name).suffix.lower() in ENDINGS


def has_only_photos(source: str, format: str | None = None) -> bool:
    """Whether a source is a folder with images, in it or below it, that no format of data has."""
    path = Path(source)
    if format is not None or is_named(source, None) or is_url(source) or not path.is_dir():
        return False
    if any(sources[name].matches(path) for name in sources):
        return False
    return any(is_photo(name) for _, _, names in os.walk(path) for name in names)


def read_photos(folder: Path, split: str = "all") -> Pairs:
    """All images in a folder and below it, without captions, sorted by their paths.

    An id is the path in the folder, without its ending if no other image has the same: the id that
    a table of captions in the folder would give the image.
    """
    paths = sorted(
        (Path(parent) / name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder)
        for name in names
        if is_photo(name)
    )
    if not paths:
        raise DataError(f"{folder}: no images (looked for {', '.join(sorted(ENDINGS))})")
    pixels = [FileImage(folder / path) for path in paths]
    photos = Split(split, short_names(paths), [[] for _ in paths], pixels)
    return Pairs(folder.resolve().name, {split: photos})
