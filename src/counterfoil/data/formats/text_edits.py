"""Edits of a text file, and the edited copy and its unified diff."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

CONTEXT_LINES = 3
MAX_LINE_CHARS = 4000
"""Longest line of a diff; a JSON file may be one line, whose diff nobody can read."""

Block = tuple[int, int, str]
"""First line, end line and new text of lines that edits change."""

Span = tuple[int, int]


@dataclass(frozen=True)
class CaptionChange:
    """A caption to replace; ``new`` is None to remove it.

    ``caption`` is its number among the usable captions of the image. It only decides between
    identical captions.
    """

    split: str
    image: str
    caption: int
    text: str
    new: str | None


@dataclass(frozen=True)
class Edit:
    """Characters ``start`` to ``end`` of a text, and what replaces them."""

    start: int
    end: int
    new: str


@dataclass
class TextCopy:
    """A text file and its edits."""

    path: Path
    text: str
    edits: list[Edit] = field(default_factory=list)
    changes: list[CaptionChange] = field(default_factory=list)

    def edited(self) -> str:
        return _apply(self.text, 0, len(self.text), self.edits)

    def diff(self) -> str:
        """The edits as a unified diff; by caption if the lines are too long to read."""
        blocks = list(_changed_blocks(self.text, self.edits))
        starts = line_starts(self.text)
        changed = (line for first, end, _ in blocks for line in range(first, end))
        if any(starts[line + 1] - starts[line] > MAX_LINE_CHARS for line in changed):
            return _caption_diff(self.path.name, self.changes)
        return _unified(self.path.name, self.text, starts, blocks)


def _apply(text: str, start: int, end: int, edits: Sequence[Edit]) -> str:
    parts = []
    for edit in edits:
        parts += [text[start : edit.start], edit.new]
        start = edit.end
    return "".join([*parts, text[start:end]])


def line_starts(text: str) -> list[int]:
    """Offsets of all lines, and the end of the text."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    return starts if starts[-1] == len(text) else [*starts, len(text)]


def _changed_blocks(text: str, edits: Sequence[Edit]) -> Iterator[Block]:
    """The runs of lines that edits change; edits are in order."""
    starts = line_starts(text)
    groups: list[tuple[int, int, list[Edit]]] = []
    for edit in edits:
        first = min(bisect_right(starts, edit.start) - 1, len(starts) - 2)
        end = max(bisect_right(starts, max(edit.end - 1, edit.start)), first + 1)
        end = min(end, len(starts) - 1)
        if groups and first < groups[-1][1]:
            groups[-1] = (groups[-1][0], max(end, groups[-1][1]), [*groups[-1][2], edit])
        else:
            groups.append((first, end, [edit]))
    for first, end, inside in groups:
        yield first, end, _apply(text, starts[first], starts[end], inside)


def _unified(name: str, text: str, starts: Sequence[int], blocks: Sequence[Block]) -> str:
    """Hunks with context; neighbors that share context are one hunk."""
    total = len(starts) - 1
    hunks: list[list[Block]] = []
    for block in blocks:
        if hunks and block[0] - hunks[-1][-1][1] <= 2 * CONTEXT_LINES:
            hunks[-1].append(block)
        else:
            hunks.append([block])
    lines = [f"--- a/{name}\n", f"+++ b/{name}\n"] if hunks else []
    shift = 0
    for hunk in hunks:
        first, end = max(hunk[0][0] - CONTEXT_LINES, 0), min(hunk[-1][1] + CONTEXT_LINES, total)
        body, index, added = [], first, 0
        for begin, stop, new in hunk:
            new_lines = _split(new)
            body += _marked(" ", _lines_of(text, starts, index, begin))
            body += [*_marked("-", _lines_of(text, starts, begin, stop)), *_marked("+", new_lines)]
            added += len(new_lines) - (stop - begin)
            index = stop
        body += _marked(" ", _lines_of(text, starts, index, end))
        old, now = end - first, end - first + added
        lines.append(f"@@ -{first + (old > 0)},{old} +{first + shift + (now > 0)},{now} @@\n")
        lines += body
        shift += added
    return "".join(lines)


def _split(text: str) -> list[str]:
    """Lines by line feeds alone."""
    starts = line_starts(text)
    return [text[a:b] for a, b in pairwise(starts)]


def _lines_of(text: str, starts: Sequence[int], first: int, end: int) -> list[str]:
    return [text[starts[line] : starts[line + 1]] for line in range(first, end)]


def _marked(sign: str, lines: Sequence[str]) -> list[str]:
    return [
        f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"
        for line in lines
    ]


def _caption_diff(name: str, changes: Sequence[CaptionChange]) -> str:
    lines = [f"--- a/{name} (captions)\n", f"+++ b/{name} (captions)\n"]
    for one in changes:
        lines.append(f"@@ {one.split}, image {one.image}, caption {one.caption + 1} @@\n")
        lines += [f"-{line}\n" for line in one.text.split("\n")]
        lines += [] if one.new is None else [f"+{one.new}\n"]
    return "".join(lines)


# JSON: the spans of values in a text, so that only those of captions are edited.

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def skip_space(text: str, index: int) -> int:
    match = _SPACE.match(text, index)
    return match.end() if match else index


def json_members(text: str, start: int) -> dict[str, Span]:
    """Spans of the values of the object at ``start``; of repeated keys, the last counts."""
    spans: dict[str, Span] = {}
    index = skip_space(text, start + 1)
    while text[index] != "}":
        key, index = _DECODER.raw_decode(text, index)
        begin = skip_space(text, skip_space(text, index) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        spans[key] = (begin, end)
        index = skip_space(text, end)
        if text[index] == ",":
            index = skip_space(text, index + 1)
    return spans


def json_elements(text: str, start: int) -> tuple[list[Span], list[object]]:
    """Spans and values of the array at ``start``."""
    spans, values = [], []
    index = skip_space(text, start + 1)
    while text[index] != "]":
        value, end = _DECODER.raw_decode(text, index)
        spans.append((index, end))
        values.append(value)
        index = skip_space(text, end)
        if text[index] == ",":
            index = skip_space(text, index + 1)
    return spans, values


def json_text(text: str, new: str) -> str:
    return json.dumps(new, ensure_ascii=text.isascii())


def without_elements(spans: Sequence[Span], removed: Sequence[int]) -> Iterator[Edit]:
    """Edits that remove elements of an array, with one comma each."""
    gone = set(removed)
    last = max((index for index in range(len(spans)) if index not in gone), default=-1)
    for index in sorted(gone):
        if index < last:
            yield Edit(spans[index][0], spans[index + 1][0], "")
    if last < len(spans) - 1:
        start = spans[last][1] if last >= 0 else spans[0][0]
        yield Edit(start, spans[-1][1], "")


def json_array(text: str, key: str) -> tuple[list[Span], list[object]]:
    """The array of a key of the file's object."""
    start = skip_space(text, int(text.startswith("\ufeff")))
    return json_elements(text, json_members(text, start)[key][0])


def json_value(text: str, span: Span) -> object:
    value: object = _DECODER.raw_decode(text, span[0])[0]
    return value
