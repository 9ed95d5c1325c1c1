"""Folders of photos without captions."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from counterfoil.core.errors import DataError
from counterfoil.core.printable import is_encodable, printable
from counterfoil.core.storage.remote import is_url
from counterfoil.data.formats import sources
from counterfoil.data.formats.image_files import ENDINGS, IMAGE_FOLDERS, short_names
from counterfoil.data.formats.table import log_unrelated, tables_in, unrelated_tables
from counterfoil.data.images import FileImage
from counterfoil.data.load import is_named
from counterfoil.data.pairs import Pairs, ProblemLog, Split


def is_photo(name: str) -> bool:
    """Whether a file name has the ending of an image, and is not hidden."""
    return not name.startswith(".") and Path(name).suffix.lower() in ENDINGS


def has_only_photos(
    source: str, format: str | None = None, options: Collection[str] | None = None
) -> bool:
    """Whether a source is a folder with images, in it or below it, that no format of data has.

    Tables that have nothing to do with the images, such as prices.csv, do not count, unless there
    are ``options`` of the data, which may say what their columns are.
    """
    path = Path(source)
    if format is not None or is_named(source, None) or is_url(source) or not path.is_dir():
        return False
    formats = [name for name in sources if sources[name].matches(path)]
    if formats == ["table"] and not options and len(unrelated_tables(path)) == len(tables_in(path)):
        formats = []
    if formats:
        return False
    return any(True for _ in _photos_below(path))


def read_photos(folder: str | Path, split: str = "all") -> Pairs:
    """All images in a folder and below it, without captions, sorted by their paths.

    An id is what a table of captions in the folder would call the image: its path in the folder, or
    in one of `IMAGE_FOLDERS`, without its ending, each unless two images would have the same id.
    """
    folder, log = Path(folder), ProblemLog()
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of images")
    paths = []
    for path in sorted(path.relative_to(folder).as_posix() for path in _photos_below(folder)):
        if is_encodable(str(folder / path)):
            paths.append(path)
        else:
            log.skip("bad-text", printable(str(folder / path)), "the path is not UTF-8 text")
    if not paths:
        reason = f"; {log.problems[0]}" if log.problems else ""
        raise DataError(f"{folder}: no images (looked for {', '.join(sorted(ENDINGS))}){reason}")
    pixels = [FileImage(folder / path) for path in paths]
    within = [_within(path) for path in paths]
    names = paths if len(set(within)) < len(paths) else within
    log_unrelated(unrelated_tables(folder), log)
    photos = Split(split, short_names(names), [[] for _ in paths], pixels)
    return Pairs(folder.resolve().name, {split: photos}, problems=log.problems)


def _photos_below(folder: Path) -> Iterator[Path]:
    """Images in a folder and below it, without hidden folders such as those of thumbnails."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if is_photo(name))


def _within(path: str) -> str:
    """A path in one of the folders in which tables look for images, without that folder."""
    folder, slash, rest = path.partition("/")
    return rest if slash and folder in IMAGE_FOLDERS else path
