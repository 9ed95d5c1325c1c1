"""The source "table": a folder of images with a CSV, TSV, JSON Lines or Parquet file of captions.

A row has one caption, or all captions of an image as a list; rows of one image are grouped. Feature
files may be beside the table (see `feature_files`), in the order of the split's images. Conversion
writes JSON Lines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from counterfoil.core.errors import MissingExtraError
from counterfoil.core.storage.reading import open_regular
from counterfoil.data.formats.base import (
    RESERVED,
    Columns,
    Draft,
    Item,
    Source,
    Writer,
    extras_of,
    find_columns,
    normalized_split,
    set_splits,
    sources,
    split_in_name,
    writers,
)
from counterfoil.data.formats.feature_files import FEATURES, FeatureWriter, open_features
from counterfoil.data.formats.image_files import (
    IMAGE_FOLDERS,
    ImageFolder,
    ImageWriter,
    image_folder,
    short_names,
    spelling_key,
)
from counterfoil.data.formats.text_files import (
    READERS,
    json_bytes,
    merge_extras,
    read_rows,
    split_extras,
)
from counterfoil.data.images import FileImage, MissingImage
from counterfoil.data.pairs import ProblemLog, Split

UNRELATED, FIRST_ROWS = "unrelated-table", 20
"""Kind of the note that a table is not read; and how many of its rows are searched for captions."""

_NAMES = ("captions", "metadata")
_NO_HEADER = (".jsonl", ".ndjson", ".parquet")  # rows name their columns themselves


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
        groups = _Groups(self.columns, log)
        for table, split in zip(tables, named, strict=True):
            groups.read(table, split)
        folder = image_folder(self.images, root, (".", *IMAGE_FOLDERS), log, deep=True)
        draft.items = groups.items(folder)
        _add_features(draft, root, log)
        return draft


@dataclass
class _Group:
    """The rows of one image."""

    image: str | None
    id: str | None
    split: str | None
    file: Path
    line: int
    has_list: bool
    label: str | None
    captions: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)

    def joins(self, other: _Group) -> bool:
        return self.image == other.image and not self.has_list and not other.has_list

    def add(self, other: _Group) -> None:
        self.captions += other.captions
        self.lines += other.lines
        self.files += other.files
        self.extras += other.extras


class _Groups:
    """Groups rows by image."""

    def __init__(self, chosen: dict[str, str | None], log: ProblemLog) -> None:
        self.chosen = chosen
        self.log = log
        self.groups: list[_Group] = []
        self._rows = 0
        self._by_key: dict[tuple[str | None, str], _Group] = {}
        self._columns: dict[tuple[str, ...], Columns | str] = {}

    def read(self, table: Path, split: str | None) -> None:
        reported = set()
        empty = True
        for line, row in read_rows(table, self.log):
            empty = False
            names = tuple(row)
            if names not in self._columns:
                self._columns[names] = find_columns(names, self.chosen)
            columns = self._columns[names]
            if isinstance(columns, Columns):
                self._add(table, line, row, columns, split)
            elif names not in reported:
                reported.add(names)
                self._refuse_columns(table, line, columns)
        if empty:
            self.log.fatal("no-images", table, "the table has no rows that can be read")

    def _refuse_columns(self, table: Path, line: int, message: str) -> None:
        if table.suffix.lower() not in _NO_HEADER:
            line, message = 1, f"{message}; the first line of the file must name the columns"
        self.log.fatal("missing-column", f"{table}:{line}", message)

    def _add(
        self, table: Path, line: int, row: dict[str, Any], columns: Columns, split: str | None
    ) -> None:
        where = f"{table}:{line}"
        self._rows += 1
        captions = self._captions(_caption_value(row, columns.captions, table), where)
        extras = split_extras({name: row[name] for name in columns.extras})
        stated = _text(row, columns.split)
        group = _Group(
            image=_image_name(row, columns, where, self.log),
            id=_text(row, columns.id),
            split=normalized_split(stated) if stated else split,
            file=table,
            line=line,
            has_list=isinstance(row[columns.captions[0]], list),
            label=_text(row, columns.label),
            captions=captions,
            lines=[line] * len(captions),
            files=[table] * len(captions),
            extras=[extras] * max(1, len(captions)),
        )
        key = group.id or group.image
        if key is None:
            self.log.skip("missing-id", where, "the row names neither an image nor an id")
            return
        first = self._by_key.get((group.split, key))
        if first is not None and first.joins(group):
            first.add(group)
            return
        self._by_key.setdefault((group.split, key), group)
        self.groups.append(group)

    def _captions(self, value: Any, where: str) -> list[str]:
        values = value if isinstance(value, list) else [value]
        captions = []
        for caption in values:
            if isinstance(caption, str):
                captions.append(caption)
            elif caption is None:
                captions.append("")
            else:
                self.log.skip("bad-caption", where, f"{caption!r} is not a text")
        return captions

    def items(self, folder: ImageFolder) -> list[Item]:
        self._join_images()
        plain = {g.image: folder.plain_name(g.image) for g in self.groups if g.image and not g.id}
        self._join_spellings(folder, plain)
        names = dict(zip(plain, short_names([*plain.values()]), strict=True))
        items = []
        for group in self.groups:
            name = group.image or ""
            image_id = group.id or names[name]
            split = group.split or ""
            item = Item(image_id, split, group.captions, group.file, group.line, group.lines)
            if len(set(group.files)) > 1:
                item.caption_files = group.files
            item.extras, item.caption_extras = _merge(group.extras, len(group.captions))
            if name:
                item.image = folder.find([name], item.where, self.log, group.label)
            items.append(item)
        if items:
            usable = {number for number, item in enumerate(items) if _is_usable(item)}
            set_splits(items, self.groups[0].file, self.log, usable)
        return items

    def _join_spellings(self, folder: ImageFolder, plain: Mapping[str, str]) -> None:
        """Group rows that write the name of one file differently, such as P1.JPG and p1.jpg."""
        alike: dict[tuple[str | None, str], list[_Group]] = {}
        for group in self.groups:
            if group.image and not group.id and not group.has_list:
                alike.setdefault((group.split, spelling_key(plain[group.image])), []).append(group)
        joined: set[int] = set()
        for groups in alike.values():
            firsts: dict[Path | str, _Group] = {}
            for group in groups if len(groups) > 1 else ():
                image = folder.find([name := group.image or ""], "", ProblemLog())
                file = image.path if isinstance(image, FileImage) else plain[name]
                first = firsts.setdefault(file, group)
                if first is not group:
                    first.add(group)
                    joined.add(id(group))
        self.groups = [group for group in self.groups if id(group) not in joined]

    def _join_images(self) -> None:
        """Group rows by image if ids number the captions: every row has its own, images repeat."""
        ids_differ = len(self.groups) == self._rows and all(
            group.id and group.image and not group.has_list for group in self.groups
        )
        images = {(group.split, group.image) for group in self.groups}
        if not ids_differ or len(images) == len(self.groups):
            return
        joined: dict[tuple[str | None, str | None], _Group] = {}
        for group in self.groups:
            group.extras = [{**extras, "caption_id": group.id} for extras in group.extras]
            group.id = None
            first = joined.setdefault((group.split, group.image), group)
            if first is not group:
                first.add(group)
        self.groups = list(joined.values())


def _is_usable(item: Item) -> bool:
    """Whether an image has a file and a caption that is not empty."""
    return not isinstance(item.image, MissingImage) and any(map(str.strip, item.captions))


def _caption_value(row: dict[str, Any], columns: tuple[str, ...], table: Path) -> Any:
    """The captions of a row: a text, or a list of texts.

    A CSV field can be a JSON list: ``["a dog", "a brown dog"]``. Empty fields of numbered columns
    are no captions.
    """
    if len(columns) > 1:
        values = [row[column] for column in columns]
        return [value for value in values if value not in (None, "")] or [""]
    value = row[columns[0]]
    is_text = table.suffix.lower() not in _NO_HEADER
    if is_text and isinstance(value, str) and value.lstrip().startswith('["'):
        with suppress(ValueError, RecursionError):
            listed = json.loads(value)
            if isinstance(listed, list) and listed:
                return listed
    return value


def tables_in(path: Path) -> list[Path]:
    """The table at a path, or those in a folder: the ones named for captions if there are any."""
    if path.is_file():
        named = path.suffix.lower() in READERS and path.suffix.lower() != ".txt"
        return [path] if named or _is_kaggle_captions(path) else []
    if not path.is_dir():
        return []
    tables = [
        file
        for file in sorted(path.iterdir())
        if not file.is_dir()
        and not file.name.endswith("_items.jsonl")
        and (file.suffix.lower() in set(READERS) - {".txt"} or _is_kaggle_captions(file))
    ]
    for name in _NAMES:
        if preferred := [file for file in tables if file.stem.lower() == name]:
            return preferred
    return tables


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
        with suppress(MissingExtraError):  # a table that cannot be read may have captions
            trial = ProblemLog()
            rows = [row for _, row in islice(read_rows(table, trial), FIRST_ROWS)]
            columns = [find_columns(row, dict(chosen or {})) for row in rows] or ["it has no rows"]
            if not trial.problems and all(isinstance(each, str) for each in columns):
                reasons[table] = str(columns[0])
    return reasons


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


def _text(row: dict[str, Any], column: str | None) -> str | None:
    value = row[column] if column is not None else None
    return None if value is None or value == "" else str(value)


def _image_name(row: dict[str, Any], columns: Columns, where: str, log: ProblemLog) -> str | None:
    value = row[columns.image] if columns.image is not None else None
    if isinstance(value, dict):
        value = value.get("path")
    if value is not None and not isinstance(value, str):
        log.skip("bad-image-name", where, f"expected a file name, found {type(value).__name__}")
        return None
    return value or None


def _merge(
    rows: list[dict[str, Any]], captions: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Extras that all rows of an image share, and those that differ per caption."""
    if not rows:
        return {}, {}
    shared: dict[str, Any] = {}
    differing: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        same = all(value is values[0] or value == values[0] for value in values)
        if same or len(values) != captions:
            shared[key] = values[0]
        else:
            differing[key] = values
    return shared, differing


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
