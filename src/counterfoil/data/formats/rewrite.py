"""Correct captions in a data set's own files: only their characters change, all else stays.

Each layout is edited as text, so columns, order, unknown fields, quoting and line ends of the
original remain. A record that is one caption (a row, a line) is removed with it; the record of an
image stays, even without captions.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from counterfoil.core.errors import DataError
from counterfoil.core.storage.reading import LINES_BYTES, read_bytes
from counterfoil.data.formats.assemble import caption_fault
from counterfoil.data.formats.base import Columns, Draft, Item, Source, find_columns
from counterfoil.data.formats.coco import CocoSource
from counterfoil.data.formats.flickr8k import Flickr8kSource
from counterfoil.data.formats.karpathy import KarpathySource
from counterfoil.data.formats.table import TableSource
from counterfoil.data.formats.text_edits import CaptionChange, Edit, TextCopy, line_starts
from counterfoil.data.formats.text_files import dialect_of, long_fields
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
    return list(dict.fromkeys(item.file for item in draft.items if item.captions))


def rewrite(source: Source, draft: Draft, changes: Sequence[CaptionChange]) -> Rewritten:
    """Edit the caption files of a data set that `can_rewrite` accepts."""
    matched, missing, emptied = locate(draft.items, changes)
    by_file: dict[Path, dict[Position, CaptionChange]] = defaultdict(dict)
    for item, number, change in matched:
        by_file[item.file][_position(item, number)] = change
    copies = []
    for path in caption_files(draft):
        copy = TextCopy(path, _read(path), changes=list(by_file[path].values()))
        if by_file[path]:
            wanted = {position: change.new for position, change in by_file[path].items()}
            copy.edits = sorted(_edits(source, copy, wanted), key=lambda edit: edit.start)
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
    line = item.caption_lines[number]
    return line, sum(one == line for one in item.caption_lines[:number])


def _read(path: Path) -> str:
    try:
        return read_bytes(path, LINES_BYTES).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _edits(source: Source, copy: TextCopy, wanted: Mapping[Position, str | None]) -> Iterator[Edit]:
    if isinstance(source, KarpathySource):
        return _karpathy_edits(copy.text, wanted)
    if isinstance(source, CocoSource):
        return _coco_edits(copy.text, wanted)
    by_line: dict[int, dict[int, str | None]] = defaultdict(dict)
    for (line, number), new in wanted.items():
        by_line[line][number] = new
    if isinstance(source, Flickr8kSource):
        return _token_edits(copy.text, by_line)
    if copy.path.suffix.lower() in (".jsonl", ".ndjson"):
        return _json_line_edits(copy.text, by_line, source)
    return _delimited_edits(copy, by_line, source)


Lines = Mapping[int, Mapping[int, str | None]]
"""New captions by line and by number within the line; None removes one."""


def _token_edits(text: str, by_line: Lines) -> Iterator[Edit]:
    starts = line_starts(text)
    for line, new in by_line.items():
        start, end = starts[line - 1], starts[line]
        if new[0] is None:
            yield Edit(start, end, "")
        else:
            content = text[start:end].rstrip("\r\n")
            yield Edit(start + content.index("\t") + 1, start + len(content), new[0])


# CSV and TSV: changed records are written again, in the record's own style of quoting.


def _delimited_edits(copy: TextCopy, by_line: Lines, source: Source) -> Iterator[Edit]:
    starts = line_starts(copy.text)
    lines = [copy.text[a:b] for a, b in pairwise(starts)]
    lines[0] = lines[0].removeprefix("\ufeff")
    delimiter, quoted = dialect_of(copy.path, lines)
    records = _records(lines, delimiter, quoted)
    _, _, names = next(records)
    header = [name.strip() for name in names]
    columns = _columns(header, source, copy.path)
    index_of = {name: index for index, name in enumerate(header)}
    for first, last, fields in records:
        if first + 1 not in by_line:
            continue
        new = dict(by_line[first + 1])
        cells = [index_of[name] for name in columns.captions]
        row = _with_captions(fields, cells, new)
        raw = "".join(lines[first:last])
        written = "" if row is None else _same_style(raw, fields, row, delimiter, quoted)
        yield Edit(starts[first], starts[last], written)


def _records(
    lines: Sequence[str], delimiter: str, quoted: bool
) -> Iterator[tuple[int, int, list[str]]]:
    """(first line, end line, fields) of every record."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    first = 0
    with long_fields():
        for fields in reader:
            if fields:
                yield first, reader.line_num, fields
            first = reader.line_num


def _columns(names: Sequence[str], source: Source, path: Path) -> Columns:
    chosen = source.columns if isinstance(source, TableSource) else {}
    columns = find_columns(names, chosen)
    if isinstance(columns, str):
        raise DataError(f"{path}: {columns}")
    return columns


def _with_captions(
    fields: Sequence[str], cells: Sequence[int], new: Mapping[int, str | None]
) -> list[str] | None:
    """A row with other captions; None if it has none left and no column for others."""
    row = list(fields)
    if len(cells) > 1:  # caption_1, caption_2 …: empty cells are no captions
        filled = [cell for cell in cells if fields[cell]]
        for number, text in new.items():
            row[filled[number]] = text or ""
        return row
    value = fields[cells[0]]
    listed = _json_list(value)
    if listed is None:
        text = new[0]
        if text is None:
            return None
        # the reader takes a text that starts like this for a list
        row[cells[0]] = json.dumps([text]) if text.lstrip().startswith('["') else text
        return row
    rest = _replaced(listed, new)
    if not rest:
        return None
    row[cells[0]] = json.dumps(rest, ensure_ascii=value.isascii())
    return row


def _json_list(value: str) -> list[object] | None:
    if not value.lstrip().startswith('["'):
        return None
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) and listed else None


def _replaced(values: Sequence[object], new: Mapping[int, str | None]) -> list[object]:
    """A list of captions with some replaced; values that are no captions stay."""
    captions = [index for index, value in enumerate(values) if value is None or _is_text(value)]
    by_index = {captions[number]: text for number, text in new.items()}
    pairs = ((by_index.get(index, value), index) for index, value in enumerate(values))
    return [value for value, index in pairs if by_index.get(index, "") is not None]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _same_style(
    raw: str, fields: Sequence[str], row: Sequence[str], delimiter: str, quoted: bool
) -> str:
    """A record, quoted as the original was: every field, or those that need it."""
    end = raw[len(raw.rstrip("\r\n")) :]
    if not quoted:
        return delimiter.join(row) + end

    def write(values: Sequence[str], quote_all: bool) -> str:
        buffer = io.StringIO(newline="")
        quoting: Literal[0, 1] = csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL
        csv.writer(buffer, delimiter=delimiter, quoting=quoting, lineterminator=end).writerow(
            values
        )
        return buffer.getvalue()

    return write(row, quote_all=write(fields, quote_all=True) == raw)


# JSON: the spans of values are found in the text, and only those of captions change.

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
Span = tuple[int, int]


def _skip(text: str, index: int) -> int:
    match = _SPACE.match(text, index)
    return match.end() if match else index


def _members(text: str, start: int) -> dict[str, Span]:
    """Spans of the values of the object at ``start``; of repeated keys, the last counts."""
    spans: dict[str, Span] = {}
    index = _skip(text, start + 1)
    while text[index] != "}":
        key, index = _DECODER.raw_decode(text, index)
        begin = _skip(text, _skip(text, index) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        spans[key] = (begin, end)
        index = _skip(text, end)
        if text[index] == ",":
            index = _skip(text, index + 1)
    return spans


def _elements(text: str, start: int) -> tuple[list[Span], list[object]]:
    """Spans and values of the array at ``start``."""
    spans, values = [], []
    index = _skip(text, start + 1)
    while text[index] != "]":
        value, end = _DECODER.raw_decode(text, index)
        spans.append((index, end))
        values.append(value)
        index = _skip(text, end)
        if text[index] == ",":
            index = _skip(text, index + 1)
    return spans, values


def _quoted(text: str, new: str) -> str:
    return json.dumps(new, ensure_ascii=text.isascii())


def _without(spans: Sequence[Span], removed: Sequence[int]) -> Iterator[Edit]:
    """Edits that remove elements of an array, with one comma each."""
    gone = set(removed)
    last = max((index for index in range(len(spans)) if index not in gone), default=-1)
    for index in sorted(gone):
        if index < last:
            yield Edit(spans[index][0], spans[index + 1][0], "")
    if last < len(spans) - 1:
        start = spans[last][1] if last >= 0 else spans[0][0]
        yield Edit(start, spans[-1][1], "")


def _document(text: str, key: str) -> tuple[list[Span], list[object]]:
    """The array of a key of the file's object."""
    start = _skip(text, int(text.startswith("\ufeff")))
    return _elements(text, _members(text, start)[key][0])


def _coco_edits(text: str, wanted: Mapping[Position, str | None]) -> Iterator[Edit]:
    spans, _ = _document(text, "annotations")
    yield from _without(spans, [position[0] for position, new in wanted.items() if new is None])
    for (number,), new in wanted.items():
        if new is not None:
            start, end = _members(text, spans[number][0])["caption"]
            yield Edit(start, end, _quoted(text, new))


def _karpathy_edits(text: str, wanted: Mapping[Position, str | None]) -> Iterator[Edit]:
    by_image: dict[int, dict[int, str | None]] = defaultdict(dict)
    for (image, sentence), new in wanted.items():
        by_image[image][sentence] = new
    images, _ = _document(text, "images")
    for image, new_texts in by_image.items():
        members = _members(text, images[image][0])
        spans, sentences = _elements(text, members["sentences"][0])
        removed = [number for number, new in new_texts.items() if new is None]
        yield from _without(spans, removed)
        if "sentids" in members and text[members["sentids"][0]] == "[":
            yield from _without_ids(text, members["sentids"][0], [sentences[n] for n in removed])
        for number, new in new_texts.items():
            if new is not None:
                yield from _sentence_edits(text, spans[number][0], new)


def _without_ids(text: str, start: int, sentences: Sequence[object]) -> Iterator[Edit]:
    spans, ids = _elements(text, start)
    gone = [one.get("sentid") for one in sentences if isinstance(one, dict)]
    yield from _without(spans, [ids.index(one) for one in gone if one in ids])


def _sentence_edits(text: str, start: int, new: str) -> Iterator[Edit]:
    """The new text of a sentence, and the tokens that follow from it."""
    members = _members(text, start)
    tokens = new.split()
    if "raw" in members:
        yield Edit(*members["raw"], _quoted(text, new))
        tokens = [word for word in words(new) if any(map(str.isalnum, word))]
    if "tokens" in members:
        yield Edit(*members["tokens"], _array_like(text, *members["tokens"], tokens))


def _array_like(text: str, start: int, end: int, values: Sequence[str]) -> str:
    """Another array with the white space of the one at ``start``."""
    spans, _ = _elements(text, start) if text[start] == "[" else ([], [])
    before = text[start + 1 : spans[0][0]] if spans else ""
    between = text[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{before or ' '}"
    after = text[spans[-1][1] : end - 1] if spans else ""
    return f"[{before}{between.join(_quoted(text, value) for value in values)}{after}]"


def _json_line_edits(text: str, by_line: Lines, source: Source) -> Iterator[Edit]:
    starts = line_starts(text)
    for line, new in by_line.items():
        start = _skip(text, starts[line - 1])
        start += text.startswith("\ufeff", start)
        members = _members(text, start)
        columns = _columns(list(members), source, Path(f"line {line}")).captions
        if len(columns) > 1:  # caption_1, caption_2 …: empty values are no captions
            filled = [c for c in columns if text[members[c][0]] == '"' != text[members[c][0] + 1]]
            for number, caption in new.items():
                yield Edit(*members[filled[number]], _quoted(text, caption or ""))
            continue
        begin, end = members[columns[0]]
        if text[begin] != "[":
            caption = new[0]
            whole = Edit(starts[line - 1], starts[line], "")
            yield whole if caption is None else Edit(begin, end, _quoted(text, caption))
            continue
        spans, values = _elements(text, begin)
        captions = [n for n, value in enumerate(values) if value is None or _is_text(value)]
        yield from _without(spans, [captions[n] for n, one in new.items() if one is None])
        for number, caption in new.items():
            if caption is not None:
                yield Edit(*spans[captions[number]], _quoted(text, caption))
