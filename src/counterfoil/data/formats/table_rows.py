"""Group the rows of tables of captions by image."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterfoil.data.formats.base import Columns, Item, find_columns, normalized_split, set_splits
from counterfoil.data.formats.image_files import ImageFolder, short_names, spelling_key
from counterfoil.data.formats.text_files import read_rows, split_extras
from counterfoil.data.images import FileImage, MissingImage
from counterfoil.data.pairs import ProblemLog

NO_HEADER = (".jsonl", ".ndjson", ".parquet")
"""Endings of tables whose rows name their columns themselves."""


@dataclass(eq=False)
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

    @property
    def key(self) -> str:
        """What rows of one image have in common: the id, or else the name of the image."""
        return self.id or self.image or ""

    def add(self, other: _Group) -> None:
        self.captions += other.captions
        self.lines += other.lines
        self.files += other.files
        self.extras += other.extras

    def sort(self) -> None:
        """Put the captions in the order of their lines, if they are all in one file."""
        order = sorted(range(len(self.lines)), key=self.lines.__getitem__)
        if len(self.extras) == len(self.captions):  # a row without captions has extras, too
            self.extras = [self.extras[number] for number in order]
        self.captions = [self.captions[number] for number in order]
        self.lines = [self.lines[number] for number in order]


class RowGroups:
    """Groups rows by image; ``chosen`` names columns by role."""

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
        if table.suffix.lower() not in NO_HEADER:
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
            split=normalized_split(stated or "") or split,
            file=table,
            line=line,
            has_list=isinstance(row[columns.captions[0]], list),
            label=_text(row, columns.label),
            captions=captions,
            lines=[line] * len(captions),
            files=[table] * len(captions),
            extras=[extras] * max(1, len(captions)),
        )
        if not group.key:
            self.log.skip("missing-id", where, "the row names neither an image nor an id")
            return
        first = self._by_key.get((group.split, group.key))
        if first is not None and first.joins(group):
            first.add(group)
            return
        self._by_key.setdefault((group.split, group.key), group)
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
        self._fill_splits(folder)
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

    def _fill_splits(self, folder: ImageFolder) -> None:
        """Give rows without a split the one that other rows of the image state.

        A hash could put these captions into another split than the others of the same image. Rows
        stay without a split if the others state several.
        """
        blank = [group for group in self.groups if not group.split]
        if not blank or len(blank) == len(self.groups):
            return
        stated: dict[str | Path, set[str]] = defaultdict(set)
        names = {group: _names_of(group, folder) for group in self.groups}
        for group in self.groups:
            for name in names[group]:
                stated[name].update(filter(None, [group.split]))
        filled = False
        for group in blank:
            splits = set().union(*(stated[name] for name in names[group]))
            if len(splits) == 1:
                group.split, filled = splits.pop(), True
        if filled:
            self._join_rows()

    def _join_rows(self) -> None:
        """Group rows of one image again, now that their splits are known."""
        firsts: dict[tuple[str | None, str], _Group] = {}
        groups, joined = [], set()
        for group in self.groups:
            first = firsts.setdefault((group.split, group.key), group)
            if first is not group and first.joins(group):
                first.add(group)
                joined.add(first)
            else:
                groups.append(group)
        for group in joined:
            group.sort()
        self.groups = groups

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


def _names_of(group: _Group, folder: ImageFolder) -> list[str | Path]:
    """What identifies the image of a row: its id, and its file (the name if there is none)."""
    names: list[str | Path] = [f"id {group.id}"] if group.id else []
    if group.image:
        image = folder.find([group.image], "", ProblemLog())
        name = folder.plain_name(group.image)
        names.append(image.path if isinstance(image, FileImage) else f"image {name}")
    return names


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
    is_text = table.suffix.lower() not in NO_HEADER
    if is_text and isinstance(value, str) and value.lstrip().startswith('["'):
        with suppress(ValueError, RecursionError):
            listed = json.loads(value)
            if isinstance(listed, list) and listed:
                return listed
    return value


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
