"""`load_pairs`: load an image–caption data set by path (format detected) or by name."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterfoil.core.errors import ConfigError, DataError, nearest
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import default_cache
from counterfoil.core.storage.remote import check_url, is_url
from counterfoil.data.formats import Source, named_sources, sources
from counterfoil.data.formats.assemble import assemble
from counterfoil.data.formats.image_files import ENDINGS, files_below
from counterfoil.data.formats.remote_shards import read_remote_shards
from counterfoil.data.pairs import Pairs, ProblemLog

SHARDS = "shards"
_NOT_OPTIONS = ("cache_dir", "progress")
_ALIASES = {
    "jsonl": "table",
    "csv": "table",
    "tsv": "table",
    "parquet": "table",
    "webdataset": "shards",
    "precomp": "scan",
}


def load_pairs(
    source: str | Path,
    format: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    strict: bool = True,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Pairs:
    """Images and captions from a path (its format is detected) or of a named data set.

    ``pairs.problems`` lists every fault that shows without decoding images or reading features.
    With ``strict``, fatal ones raise one `DataError` that lists them, and unusable captions and
    images are left out. Without it, nothing raises and nothing is left out. The ``options`` of a
    source are listed by ``counterfoil.data.sources.options("karpathy")``. A named data set is made
    in ``cache_dir`` at its first use. An address (``https://…/train-{000..009}.tar``) names shards;
    ``cache_dir`` then has their table of contents.
    """
    if is_named(source, format):
        return make_named(str(source), options or {}, cache_dir, progress)
    log = ProblemLog()
    if is_url(source):
        pairs = read_url(str(source), format, options, cache_dir, progress, log, drop=strict)
    else:
        pairs = read_path(Path(source), format, options or {}, log, drop=strict)
    if strict:
        log.refuse_fatal()
    return pairs


def is_named(source: str | Path, format: str | None) -> bool:
    """Whether a source is a name of `named_sources`; ``./name`` is always a path."""
    return isinstance(source, str) and source in named_sources and format is None


def make_named(
    name: str,
    options: Mapping[str, Any],
    cache_dir: str | Path | None,
    progress: Progress | None,
) -> Pairs:
    """A data set of `named_sources`, made in ``cache_dir`` if needed."""
    _check_named(name, options)
    folder = Path(cache_dir) if cache_dir is not None else default_cache()
    return named_sources[name](folder, progress=progress or Silent(), **options)


def _check_named(name: str, options: Mapping[str, Any]) -> None:
    for key in _NOT_OPTIONS:
        if key in options:
            raise ConfigError(f"options.{key}: not an option of the data set '{name}'")
    named_sources.check(name, options, where="options")


def read_url(
    url: str,
    format: str | None,
    options: Mapping[str, Any] | None,
    cache_dir: str | Path | None,
    progress: Progress | None,
    log: ProblemLog,
    *,
    drop: bool,
) -> Pairs:
    """Read the shards at an address and log their problems."""
    check_source(url, format, options)
    folder = Path(cache_dir) if cache_dir is not None else default_cache()
    draft = read_remote_shards(url, log, folder, progress or Silent())
    return assemble(draft, log, drop=drop)


def read_path(
    path: Path,
    format: str | None,
    options: Mapping[str, Any],
    log: ProblemLog,
    *,
    drop: bool,
) -> Pairs:
    """Read a path and log its problems; raises only if there is nothing to read."""
    reader = open_source(path, format, options, log)
    return assemble(reader.read(path, log), log, drop=drop)


def open_source(
    path: Path, format: str | None, options: Mapping[str, Any], log: ProblemLog
) -> Source:
    """The reader of an existing path in the given format (None: detected)."""
    _check_path(path)
    reader: Source = sources.create(_reader_of(path, format, log), options, where="options")
    return reader


def path_options(source: str | Path, format: str | None) -> set[str]:
    """Options of a source that are paths, by the types that it declares."""
    if is_named(source, format):
        return named_sources.path_options(str(source))
    if is_url(source):
        return sources.path_options(SHARDS)
    return sources.path_options(_reader_of(Path(source), format, ProblemLog()))


def _reader_of(path: Path, format: str | None, log: ProblemLog) -> str:
    """Name of the source that reads a path in the given format (None: detected)."""
    name = _ALIASES.get(format, format) if format is not None else detect_format(path, log)
    if name not in sources:
        raise ConfigError(
            f"unknown format '{name}'{nearest(name, sources)} (known: {', '.join(sources)})"
        )
    return name


def detect_format(path: Path, log: ProblemLog) -> str:
    """Name of the source whose layout a path has; the error lists what each looks for."""
    ranked = _matching_formats(path)
    if not ranked:
        layouts = "\n".join(f"  {name}: {sources[name].looks_for}" for name in sources)
        raise DataError(
            f"{path}: not a known data set layout{_nearest_format(path)}; looked for:\n{layouts}"
        )
    best = [name for rank, name in ranked if rank == ranked[0][0]]
    if len(best) > 1:
        log.note(
            "several-formats",
            path,
            f"could be {' or '.join(best)}; read as {best[0]} (name the format to choose)",
        )
    return best[0]


def are_read_alike(reader: Source, one: Path, other: Path) -> bool:
    """Whether two caption files of the same layout are read as one format and split.

    Some layouts take these from the name of a file.
    """
    formats = [min(_matching_formats(path), default=None) for path in (one, other)]
    return formats[0] == formats[1] and reader.split_of_file(one) == reader.split_of_file(other)


def other_formats(path: Path) -> list[str]:
    """Further layouts in a folder, besides the one that `detect_format` chooses."""
    return [name for _, name in _matching_formats(path)[1:]] if path.is_dir() else []


def _matching_formats(path: Path) -> list[tuple[int, str]]:
    """(rank, name) of all sources whose layout a path has, preferred first."""
    return sorted((sources[name].rank, name) for name in sources if sources[name].matches(path))


_BESIDE = re.compile(r"\.|readme|licen[cs]e|.*\.(md|html?|ini|db)$", re.IGNORECASE)
"""Files that lie beside photos and have no captions."""


_ALIKE, _NEARLY_EQUAL = 0.5, 0.75
"""Resemblance of a file's name to those of a format, alone and among photos."""


def _nearest_format(path: Path) -> str:
    if path.is_file() and path.suffix.lower() in ENDINGS:
        return " (it is an image: name the folder that it is in)"
    names = os.listdir(path) if path.is_dir() else [path.name]
    if not names:
        return " (the folder is empty)"
    photos = [name for name in names if Path(name).suffix.lower() in ENDINGS]
    others = {name for name in set(names) - set(photos) if not _BESIDE.match(name)}
    best = (0.0, "", "", "")
    for name in others:
        for source in sources:
            for example in sources[source].examples:
                ratio = difflib.SequenceMatcher(None, name.lower(), example.lower()).ratio()
                best = max(best, (ratio, source, name, example))
    ratio, source, name, example = best
    only_folders = bool(photos) and all((path / name).is_dir() for name in others)
    is_album = path.is_dir() and any(True for _ in files_below([path]))
    if is_album and (ratio < _NEARLY_EQUAL or only_folders):
        return (
            " (it has images but no captions: list these in captions.csv, with the columns image "
            "and caption, or search the images without: counterfoil demo FOLDER, or counterfoil "
            "index photos-vse FOLDER --out INDEX)"
        )
    if ratio < _ALIKE:
        return ""
    return f"; nearest is '{source}' ('{name}' resembles '{example}')"


def check_source(source: str, format: str | None, options: Mapping[str, Any] | None = None) -> None:
    """Check that path, format and options exist, without reading or making anything."""
    if is_named(source, format):
        _check_named(source, options or {})
    elif is_url(source):
        check_url(source)
        if format is not None and _ALIASES.get(format, format) != SHARDS:
            raise ConfigError(f"format '{format}': an address names {SHARDS}, no other format")
        sources.check(SHARDS, options or {}, where="options")
    else:
        _check_path(Path(source))
        name = _reader_of(Path(source), format, ProblemLog())
        sources.check(name, options or {}, where="options")


def _check_path(path: Path) -> None:
    if not path.exists():
        known = f" (data sets with a name: {', '.join(named_sources)})" if [*named_sources] else ""
        raise DataError(
            f"{path}: no such file or folder, nor a data set of that name"
            f"{nearest(str(path), named_sources)}{known}"
        )
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: not a regular file or folder but a FIFO, a socket or a device")
