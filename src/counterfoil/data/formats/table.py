"""The source "table": a folder of images with a CSV, TSV, JSON Lines or Parquet file of captions.

A row has one caption, or all captions of an image as a list; rows of one image are grouped. Feature
files may be beside the table (see `feature_files`), in the order of the split's images. Conversion
writes JSON Lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from counterfoil.core.errors import MissingExtraError
from counterfoil.core.storage.reading import open_regular
from counterfoil.data.formats.base import (
    RESERVED,
    Draft,
    Item,
    Source,
    Writer,
    extras_of,
    find_columns,
    sources,
    split_in_name,
    writers,
)
from counterfoil.data.formats.feature_files import FEATURES, FeatureWriter, open_features
from counterfoil.data.formats.image_files import (
    IMAGE_FOLDERS,
    ImageWriter,
    image_folder,
)
from counterfoil.data.formats.table_rows import RowGroups
from counterfoil.data.formats.text_files import (
    READERS,
    json_bytes,
    merge_extras,
    read_rows,
)
from counterfoil.data.pairs import ProblemLog, Split

UNRELATED, UNUSED = "unrelated-table", "unused-table"
"""Kinds of the notes that a table is not read: it has no captions, or another one is preferred."""

FIRST_ROWS = 20
"""Rows of a table that are searched for captions."""

_NAMES = ("captions", "metadata")


@sources.register("table")
class TableSource(Source):
    """A folder of images with a table of captions: CSV, TSV, JSON Lines or Parquet.

    ``images`` is the folder of images; ``image_column``, ``caption_column``, ``id_column`` and
    ``split_column`` name columns that the aliases in `base.ALIASES` do not cover.
    """

    looks_for = "a .csv, .tsv, .jsonl or .parquet file of captions, or a folder with one"
    examples = ("captions.csv", "captions.tsv", "captions.jsonl", "captions.parquet")
    rank = 1

    def __init__(
        self,
        *,
        images: str | Path | None = None,
        image_column: str | None = None,
        caption_column: str | None = None,
        id_column: str | None = None,
        split_column: str | None = None,
    ) -> None:
        self.images = images
        self.columns = {
            "image": image_column,
            "captions": caption_column,
            "id": id_column,
            "split": split_column,
        }

    @classmethod
    def matches(cls, path: Path) -> bool:
        return bool(tables_in(path))

    @classmethod
    def split_of_file(cls, path: Path) -> str | None:
        """The split of a single table: its whole name, as a part may look like one by chance."""
        stem = path.stem.lower()
        return stem if split_in_name(stem) == stem else None

    def read(self, path: Path, log: ProblemLog) -> Draft:
        root = path if path.is_dir() else path.parent
        draft = Draft(path.name if path.is_dir() else path.stem)
        tables = [path] if path.is_file() and path.suffix.lower() in READERS else tables_in(path)
        if len(tables) > 1:
            others = unrelated_tables(path, self.columns)
            if len(others) < len(tables):
                log_unrelated(others, log)
                tables = [table for table in tables if table not in others]
        elif tables and path.is_dir():
            _log_unused(path, tables[0], self.columns, log)
        split_of = self.split_of_file if len(tables) == 1 else lambda t: split_in_name(t.stem)
        named = [split_of(table) for table in tables]
        if not tables:
            log.fatal("missing-file", path, f"no table of captions (looked for {self.looks_for})")
        if len(tables) > 1 and (None in named or len(set(named)) < len(named)):
            log.fatal(
                "ambiguous-files",
                path,
                f"several tables: {', '.join(t.name for t in tables)}; name the one to read",
            )
            return draft
        groups = RowGroups(self.columns, log)
        for table, split in zip(tables, named, strict=True):
            groups.read(table, split)
        folder = image_folder(self.images, root, (".", *IMAGE_FOLDERS), log, deep=True)
        draft.items = groups.items(folder)
        _add_features(draft, root, log)
        return draft


def _is_readable(path: Path) -> bool:
    """Whether a path is a file that can be read as a table, if the user says that it is one."""
    return path.is_file() and path.suffix.lower() in READERS


def tables_in(path: Path) -> list[Path]:
    """The table at a path, or those in a folder: the ones named for captions if there are any."""
    if path.is_file():
        named = path.suffix.lower() in READERS and path.suffix.lower() != ".txt"
        return [path] if named or _is_kaggle_captions(path) else []
    tables = _all_tables(path) if path.is_dir() else []
    for name in _NAMES:
        if preferred := [file for file in tables if file.stem.lower() == name]:
            return preferred
    return tables


def _all_tables(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if not file.is_dir()
        and not file.name.endswith("_items.jsonl")
        and (file.suffix.lower() in set(READERS) - {".txt"} or _is_kaggle_captions(file))
    ]


def unrelated_tables(
    folder: Path, chosen: Mapping[str, str | None] | None = None
) -> dict[Path, str]:
    """Tables in a folder without columns of images and captions, such as prices.csv; with reasons.

    The name of a table (captions, metadata or a split) can say that it has captions; then it is not
    listed, as its columns are a mistake to report. ``chosen`` names columns by role.
    """
    reasons = {}
    for table in tables_in(folder) if folder.is_dir() else ():
        if table.stem.lower() in _NAMES or split_in_name(table.stem):
            continue
        if reason := _why_unrelated(table, chosen):
            reasons[table] = reason
    return reasons


def _why_unrelated(table: Path, chosen: Mapping[str, str | None] | None) -> str:
    """Why a table has no captions of images; empty if it may have some."""
    with suppress(MissingExtraError):  # a table that cannot be read may have captions
        trial = ProblemLog()
        rows = [row for _, row in islice(read_rows(table, trial), FIRST_ROWS)]
        columns = [find_columns(row, dict(chosen or {})) for row in rows] or ["it has no rows"]
        if not trial.problems and all(isinstance(each, str) for each in columns):
            return str(columns[0])
    return ""


def _log_unused(
    folder: Path, used: Path, chosen: Mapping[str, str | None], log: ProblemLog
) -> None:
    """Note the tables of a folder that may have captions, but of which one was preferred."""
    preferred = tables_in(folder)
    for table in _all_tables(folder):
        if table not in preferred and not _why_unrelated(table, chosen):
            log.note(UNUSED, table, f"not used as captions: the captions are from {used.name}")


def log_unrelated(tables: Mapping[Path, str], log: ProblemLog) -> None:
    """Note that tables are not read, and why."""
    for table, reason in tables.items():
        log.note(UNRELATED, table, f"not used as captions: {reason}")


def _is_kaggle_captions(path: Path) -> bool:
    """Kaggle's Flickr8k has its CSV in a file called captions.txt."""
    if path.name != "captions.txt":
        return False
    try:
        with open_regular(path) as file:
            return file.readline(200).strip().lower().startswith(b"image,")
    except OSError:
        return False


def _add_features(draft: Draft, root: Path, log: ProblemLog) -> None:
    by_split: dict[str, list[Item]] = defaultdict(list)
    for item in draft.items:
        by_split[item.split].append(item)
    for split, items in by_split.items():
        table = open_features(root, split, log)
        if table is None:
            continue
        if len(table) != len(items):
            log.fatal(
                "count-mismatch",
                root / (split + FEATURES),
                f"{len(table)} rows of features for {len(items)} images",
            )
        for row, item in enumerate(items):
            item.row = row
        draft.tables[split] = table


# A line of `captions.jsonl` has ``id``, ``split``, ``image`` (a path in the folder),
# ``original_name`` (the image's name if the file has another), ``captions`` and the extras, or all
# extras under ``extras`` if one of them has the name of a column.
@writers.register("jsonl")
class JsonlWriter(Writer):
    """Writes one JSON object per image, image files and feature files."""

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        super().__init__(folder, log)
        self._images = ImageWriter(folder, log)

    def write_split(self, split: Split, images: Iterable[int]) -> None:
        with (
            (self.folder / "captions.jsonl").open("ab") as file,
            FeatureWriter(self.folder, split.name, split.fragments) as features,
        ):
            for image in images:
                record = {
                    "id": split.ids[image],
                    "split": split.name,
                    **self._images.describe(split, image),
                    "captions": list(split.captions[image]),
                }
                record = merge_extras(record, extras_of(split, image), RESERVED)
                file.write(json_bytes(record) + b"\n")
                features.write(image)
