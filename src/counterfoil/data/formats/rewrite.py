"""Correct captions in a data set's own files: only their characters change, all else stays.

Each layout is edited as text, so columns, order, unknown fields, quoting and line ends of the
original remain. A caption is only replaced if the file has its text at that place. A record that
is one caption (a row, a line) is removed with it; the record of an image stays, even without
captions.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from counterfoil.core.errors import DataError
from counterfoil.core.storage.reading import LINES_BYTES, read_bytes
from counterfoil.data.formats.assemble import caption_fault
from counterfoil.data.formats.base import Columns, Draft, Item, Source, find_columns
from counterfoil.data.formats.coco import CocoSource
from counterfoil.data.formats.flickr8k import Flickr8kSource
from counterfoil.data.formats.karpathy import KarpathySource, sentence_text
from counterfoil.data.formats.table import TableSource
from counterfoil.data.formats.text_edits import (
    CaptionChange,
    Edit,
    Span,
    TextCopy,
    json_array,
    json_elements,
    json_members,
    json_text,
    json_value,
    line_starts,
    skip_space,
    without_elements,
)
from counterfoil.data.formats.text_files import Dialect, dialect_of, long_fields
from counterfoil.data.text.words import words

Position = tuple[int, ...]
"""Line and number within the line of a caption, or its indices in a JSON file."""


@dataclass(frozen=True)
class Rewritten:
    """Copies of all caption files of a data set.

    ``missing`` changes name captions that the data do not have. ``emptied`` are ids of images
    whose captions are all removed.
    """

    copies: list[TextCopy]
    missing: list[CaptionChange]
    emptied: list[str]


def can_rewrite(source: Source, draft: Draft) -> bool:
    """Whether the captions of a data set are in text files of a known layout."""
    if isinstance(source, TableSource):
        return all(file.suffix.lower() != ".parquet" for file in caption_files(draft))
    return isinstance(source, CocoSource | KarpathySource | Flickr8kSource)


def caption_files(draft: Draft) -> list[Path]:
    """The files that have captions, in the order of their first image."""
    return list(
        dict.fromkeys(
            item.caption_file(number)
            for item in draft.items
            for number in range(len(item.captions))
        )
    )


def rewrite(source: Source, draft: Draft, changes: Sequence[CaptionChange]) -> Rewritten:
    """Edit the caption files of a data set that `can_rewrite` accepts."""
    matched, missing, emptied = locate(draft.items, changes)
    by_file: dict[Path, dict[Position, CaptionChange]] = defaultdict(dict)
    for item, number, change in matched:
        by_file[item.caption_file(number)][_position(item, number)] = change
    copies = []
    for path in caption_files(draft):
        copy = TextCopy(path, _read(path), changes=list(by_file[path].values()))
        if by_file[path]:
            copy.edits = _checked_edits(source, copy, by_file[path])
        copies.append(copy)
    return Rewritten(copies, missing, emptied)


def locate(
    items: Sequence[Item], changes: Sequence[CaptionChange]
) -> tuple[list[tuple[Item, int, CaptionChange]], list[CaptionChange], list[str]]:
    """(item, number of the caption, change) by image id and text; missing ones; emptied images."""
    by_id: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_id[item.id].append(item)
    used: set[tuple[int, int]] = set()
    matched: list[tuple[Item, int, CaptionChange]] = []
    missing: list[CaptionChange] = []
    removed: dict[int, int] = defaultdict(int)
    for change in changes:
        # a split may have another name here: a run sets dev images aside from train
        for item in sorted(by_id[change.image], key=lambda one: one.split != change.split):
            number = _find_caption(item, change, used)
            if number is not None:
                used.add((id(item), number))
                matched.append((item, number, change))
                removed[id(item)] += change.new is None
                break
        else:
            missing.append(change)
    changed = {id(item): item for item, _, _ in matched}
    emptied = [
        item.id
        for key, item in changed.items()
        if removed[key] and removed[key] == len(_usable(item))
    ]
    return matched, missing, emptied


def _find_caption(item: Item, change: CaptionChange, used: set[tuple[int, int]]) -> int | None:
    numbers = [
        number
        for number, text in enumerate(item.captions)
        if text == change.text and (id(item), number) not in used
    ]
    usable = _usable(item)
    named = usable[change.caption] if 0 <= change.caption < len(usable) else None
    return named if named in numbers else next(iter(numbers), None)


def _usable(item: Item) -> list[int]:
    return [number for number, text in enumerate(item.captions) if caption_fault(text) is None]


def _position(item: Item, number: int) -> Position:
    if item.caption_paths:
        return item.caption_paths[number]
    assert item.caption_lines is not None  # noqa: S101 - every other layout has them
    places = [(item.caption_file(n), item.caption_lines[n]) for n in range(number + 1)]
    return item.caption_lines[number], places.count(places[number]) - 1


def _read(path: Path) -> str:
    try:
        return read_bytes(path, LINES_BYTES).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _checked_edits(
    source: Source, copy: TextCopy, wanted: Mapping[Position, CaptionChange]
) -> list[Edit]:
    try:
        return sorted(_edits(source, copy, wanted), key=lambda edit: edit.start)
    except (LookupError, ValueError, csv.Error):
        raise DataError(f"{copy.path}: changed while it was read; export again") from None


def _new_text(text: object, change: CaptionChange) -> str | None:
    """What replaces the ``text`` at the place of a caption, which must be the caption's own."""
    if (text or "") != change.text:
        raise DataError(
            f"image '{change.image}': expected the caption {change.text!r} at its place in the "
            f"file, found {text!r}; nothing was written. If the file was edited meanwhile, export "
            "again"
        )
    return change.new


def _edits(
    source: Source, copy: TextCopy, wanted: Mapping[Position, CaptionChange]
) -> Iterator[Edit]:
    if isinstance(source, KarpathySource):
        return _karpathy_edits(copy.text, wanted)
    if isinstance(source, CocoSource):
        return _coco_edits(copy.text, wanted)
    by_line: dict[int, dict[int, CaptionChange]] = defaultdict(dict)
    for (line, number), change in wanted.items():
        by_line[line][number] = change
    if isinstance(source, Flickr8kSource):
        return _token_edits(copy.text, by_line)
    if copy.path.suffix.lower() in (".jsonl", ".ndjson"):
        return _json_line_edits(copy.text, by_line, source)
    return _delimited_edits(copy, by_line, source)


Lines = Mapping[int, Mapping[int, CaptionChange]]
"""Changes by line and by number of the caption within the line."""


def _token_edits(text: str, by_line: Lines) -> Iterator[Edit]:
    starts = line_starts(text)
    for line, changes in by_line.items():
        start, end = starts[line - 1], starts[line]
        content = text[start:end].removesuffix("\n").removesuffix("\r")
        begin = content.index("\t") + 1
        new = _new_text(content[begin:], changes[0])
        if new is None:
            yield Edit(start, end, "")
        else:
            yield Edit(start + begin, start + len(content), new)


# CSV and TSV: only the cell of a caption is written again, quoted if it was quoted.


def _delimited_edits(copy: TextCopy, by_line: Lines, source: Source) -> Iterator[Edit]:
    starts = line_starts(copy.text)
    lines = [copy.text[a:b] for a, b in pairwise(starts)]
    lines[0] = lines[0].removeprefix("\ufeff")
    dialect = dialect_of(copy.path, lines)
    records = _records(lines, dialect)
    _, _, names = next(records, (0, 0, []))
    header = [name.strip() for name in names]
    columns = _columns(header, source, copy.path)
    index_of = {name: index for index, name in enumerate(header)}
    cells = [index_of[name] for name in columns.captions]
    left = dict(by_line)
    for first, last, fields in records:
        changes = left.pop(first + 1, None)
        if changes is None:
            continue
        new = _new_cells(fields, cells, changes)
        if new is None:
            yield Edit(starts[first], starts[last], "")
            continue
        raw = "".join(lines[first:last])
        spans = _cell_spans(raw, dialect)
        for cell, text in new.items():
            start, end = spans[cell]
            written = text
            if dialect.is_quoted:
                written = _cell_like(raw[start:end], text, dialect.delimiter)
            yield Edit(starts[first] + start, starts[first] + end, written)
    if left:
        raise LookupError(f"no record starts at line {min(left)}")


def _records(lines: Sequence[str], dialect: Dialect) -> Iterator[tuple[int, int, list[str]]]:
    """(first line, end line, fields) of every record, the header first."""
    first = dialect.header
    with long_fields():
        reader = dialect.reader(lines)
        for fields in reader:
            end = dialect.header + reader.line_num
            if fields:
                yield first, end, fields
            first = end


def _columns(names: Sequence[str], source: Source, path: Path) -> Columns:
    chosen = source.columns if isinstance(source, TableSource) else {}
    columns = find_columns(names, chosen)
    if isinstance(columns, str):
        raise DataError(f"{path}: {columns}")
    return columns


def _new_cells(
    fields: Sequence[str], cells: Sequence[int], changes: Mapping[int, CaptionChange]
) -> dict[int, str] | None:
    """New texts of a row's cells; None if it has no caption left and no column for others."""
    if len(cells) > 1:  # caption_1, caption_2 …: empty cells are no captions
        filled = [cell for cell in cells if fields[cell]]
        return {
            filled[number]: _new_text(fields[filled[number]], change) or ""
            for number, change in changes.items()
        }
    value = fields[cells[0]]
    listed = _json_list(value)
    if listed is None:
        text = _new_text(value, changes[0])
        if text is None:
            return None
        # the reader takes a text that starts like this for a list
        return {cells[0]: json.dumps([text]) if text.lstrip().startswith('["') else text}
    rest = _replaced(listed, changes)
    return {cells[0]: json.dumps(rest, ensure_ascii=value.isascii())} if rest else None


def _json_list(value: str) -> list[object] | None:
    if not value.lstrip().startswith('["'):
        return None
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) and listed else None


def _replaced(values: Sequence[object], changes: Mapping[int, CaptionChange]) -> list[object]:
    """A list of captions with some replaced; values that are no captions stay."""
    numbers = _caption_numbers(values)
    new = {numbers[n]: _new_text(values[numbers[n]], change) for n, change in changes.items()}
    pairs = ((new.get(index, value), index) for index, value in enumerate(values))
    return [value for value, index in pairs if new.get(index, "") is not None]


def _caption_numbers(values: Sequence[object]) -> list[int]:
    """Indices of the values that the reader takes for captions; null is an empty one."""
    return [n for n, value in enumerate(values) if value is None or isinstance(value, str)]


_QUOTED_CELL = re.compile(r'"[^"]*(?:""[^"]*)*"')


def _cell_spans(raw: str, dialect: Dialect) -> list[Span]:
    """Where the cells of a record are in its text."""
    end = len(raw.rstrip("\r\n"))
    spans: list[Span] = []
    start = 0
    while True:
        match = _QUOTED_CELL.match(raw, start) if dialect.is_quoted else None
        stop = match.end() if match else raw.find(dialect.delimiter, start, end)
        stop = end if stop < 0 else stop
        spans.append((start, stop))
        if stop == end:
            return spans
        start = stop + 1


def _cell_like(cell: str, text: str, delimiter: str) -> str:
    """Another text for a cell: in quotes if the cell is, or if the text needs them."""
    # Quotes within a cell that is not in quotes are ordinary characters.
    needed = any(sign in text for sign in (delimiter, "\r", "\n")) or (
        '"' in text and ('"' not in cell or text.startswith('"'))
    )
    if needed or cell.startswith('"'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _coco_edits(text: str, wanted: Mapping[Position, CaptionChange]) -> Iterator[Edit]:
    spans, annotations = json_array(text, "annotations")
    removed = []
    for (number,), change in wanted.items():
        annotation = annotations[number]
        new = _new_text(isinstance(annotation, dict) and annotation["caption"], change)
        if new is None:
            removed.append(number)
        else:
            start, end = json_members(text, spans[number][0])["caption"]
            yield Edit(start, end, json_text(text, new))
    yield from without_elements(spans, removed)


def _karpathy_edits(text: str, wanted: Mapping[Position, CaptionChange]) -> Iterator[Edit]:
    by_image: dict[int, dict[int, CaptionChange]] = defaultdict(dict)
    for (image, sentence), change in wanted.items():
        by_image[image][sentence] = change
    images, _ = json_array(text, "images")
    for image, changes in by_image.items():
        members = json_members(text, images[image][0])
        spans, sentences = json_elements(text, members["sentences"][0])
        removed = []
        for number, change in changes.items():
            new = _new_text(sentence_text(sentences[number]), change)
            if new is None:
                removed.append(number)
            else:
                yield from _sentence_edits(text, spans[number][0], new)
        yield from without_elements(spans, removed)
        if "sentids" in members and text[members["sentids"][0]] == "[":
            yield from _without_ids(text, members["sentids"][0], [sentences[n] for n in removed])


def _without_ids(text: str, start: int, sentences: Sequence[object]) -> Iterator[Edit]:
    spans, ids = json_elements(text, start)
    gone = [one.get("sentid") for one in sentences if isinstance(one, dict)]
    yield from without_elements(spans, [ids.index(one) for one in gone if one in ids])


def _sentence_edits(text: str, start: int, new: str) -> Iterator[Edit]:
    """The new text of a sentence, and the tokens that follow from it."""
    members = json_members(text, start)
    tokens = new.split()
    if "raw" in members:
        yield Edit(*members["raw"], json_text(text, new))
        tokens = [word for word in words(new) if any(map(str.isalnum, word))]
    if "tokens" in members:
        yield Edit(*members["tokens"], _array_like(text, *members["tokens"], tokens))


def _array_like(text: str, start: int, end: int, values: Sequence[str]) -> str:
    """Another array with the white space of the one at ``start``."""
    spans, _ = json_elements(text, start) if text[start] == "[" else ([], [])
    before = text[start + 1 : spans[0][0]] if spans else ""
    between = text[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{before or ' '}"
    after = text[spans[-1][1] : end - 1] if spans else ""
    return f"[{before}{between.join(json_text(text, value) for value in values)}{after}]"


def _json_line_edits(text: str, by_line: Lines, source: Source) -> Iterator[Edit]:
    starts = line_starts(text)
    for line, changes in by_line.items():
        start = skip_space(text, starts[line - 1])
        start += text.startswith("\ufeff", start)
        members = json_members(text, start)
        columns = _columns(list(members), source, Path(f"line {line}")).captions
        if len(columns) > 1:  # caption_1, caption_2 …: empty values are no captions
            values = [members[c] for c in columns]
            filled = [(a, b) for a, b in values if text[a] == '"' != text[a + 1]]
            for number, change in changes.items():
                span = filled[number]
                new = _new_text(json_value(text, span), change)
                yield Edit(*span, json_text(text, new or ""))
            continue
        span = members[columns[0]]
        if text[span[0]] == "[":
            yield from _list_edits(text, span[0], changes)
            continue
        new = _new_text(json_value(text, span), changes[0])
        whole = Edit(starts[line - 1], starts[line], "")
        yield whole if new is None else Edit(*span, json_text(text, new))


def _list_edits(text: str, start: int, changes: Mapping[int, CaptionChange]) -> Iterator[Edit]:
    """Edits of the list of captions at ``start``."""
    spans, values = json_elements(text, start)
    numbers = _caption_numbers(values)
    removed = []
    for number, change in changes.items():
        index = numbers[number]
        new = _new_text(values[index], change)
        if new is None:
            removed.append(index)
        else:
            yield Edit(*spans[index], json_text(text, new))
    yield from without_elements(spans, removed)
