"""Captions that a person has checked: from the decisions of a review, or from a table of labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from counterfoil.audit.decisions import LOG, CaptionKey, DecisionLog
from counterfoil.audit.findings import unescape_formula
from counterfoil.core.errors import DataError
from counterfoil.core.printable import plural
from counterfoil.data.formats.base import ALIASES, normalized_split
from counterfoil.data.formats.image_files import folded
from counterfoil.data.formats.text_files import READERS, read_rows
from counterfoil.data.images import FileImage, ImageRef
from counterfoil.data.pairs import ProblemLog, Split

LABELS = {
    **dict.fromkeys(("wrong", "true", "yes", "1"), True),
    **dict.fromkeys(("right", "false", "no", "0"), False),
}
TABLES = (".csv", ".tsv", ".jsonl")


@dataclass
class CheckedCaptions:
    """Whether captions are wrong: by split, and by their number in its texts.

    ``unknown`` counts labels of captions that the splits do not have, ``conflicts`` captions on
    which reviewers disagree, ``damaged`` lines of a log that are no decisions.
    """

    splits: dict[str, dict[int, bool]] = field(default_factory=dict)
    unknown: int = 0
    conflicts: int = 0
    damaged: int = 0

    def notes(self) -> list[str]:
        """Lines about what was not used."""
        lines = []
        if self.unknown:
            lines.append(
                f"{plural(self.unknown, 'checked caption is', 'checked captions are')} not among "
                "the audited ones (another split or image, or a text that has changed); "
                f"{'it was' if self.unknown == 1 else 'they were'} not used"
            )
        if self.conflicts:
            one = "caption with conflicting decisions was not used"
            many = "captions with conflicting decisions were not used"
            lines.append(plural(self.conflicts, one, many))
        if self.damaged:
            one, many = "line that is no decision was", "lines that are no decisions were"
            lines.append(f"{plural(self.damaged, one, many)} skipped")
        return lines


def read_checked(path: Path, splits: Sequence[Split]) -> CheckedCaptions:
    """The checked captions of splits, from an audit folder, its decisions file, or a table.

    Of decisions, *keep* means right, *fix* and *discard* mean wrong. A table (CSV, TSV or JSON
    Lines) has the columns ``image``, ``wrong``, and ``text`` or ``caption``, the number among the
    captions of the image; ``split`` is optional. Rows without a value for ``wrong`` do not count.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder of checked captions")
    index = _Index(splits)
    if path.is_dir() or path.name == LOG or _has_decisions(path):
        result = _from_decisions(path, index)
    elif path.suffix.lower() in TABLES:
        result = _from_table(path, index)
    else:
        raise DataError(
            f"{path}: expected an audit folder, its {LOG}, or a table of labels "
            f"({', '.join(TABLES)})"
        )
    if not any(result.splits.values()):
        names = ", ".join(split.name for split in splits)
        why = "; ".join(result.notes()) or "it has no labels"
        named = f" Images are named {index.examples()}" if result.unknown else ""
        raise DataError(
            f"{path}: none of its checked captions can be used for {names}: {why}.{named}"
        )
    return result


class _Index:
    """Numbers of captions by image and text, and by image and number among its captions."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self.by_text: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
        self.by_number: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        self.keys: set[CaptionKey] = set()
        self.splits = {split.name for split in splits}
        self._ids = dict.fromkeys(image for split in splits for image in split.ids)
        self._files = _Files()
        for split in splits:
            number = 0
            for image, ref in zip(split.ids, split.pixels or (), strict=False):
                self._files.add(image, ref)
            for image, captions in zip(split.ids, split.captions, strict=True):
                for own, text in enumerate(captions):
                    self.by_text[image, text].append((split.name, number))
                    self.by_number[image, own].append((split.name, number))
                    self.keys.add(CaptionKey(split.name, image, own, text))
                    number += 1

    def find(
        self, image: str, text: str | None, caption: int | None, split: str | None
    ) -> list[tuple[str, int]]:
        """The captions meant, all of them if several are the same; empty if there is none."""
        image = self._image_id(image)

        def in_split(matches: list[tuple[str, int]] | None) -> list[tuple[str, int]]:
            return [one for one in matches or () if split is None or one[0] == split]

        numbered = [] if caption is None else in_split(self.by_number.get((image, caption)))
        if text is None:
            return numbered
        same = in_split(self.by_text.get((image, text)))
        # the number only decides between identical captions: others may have been removed
        return [one for one in same if one in numbered] or same

    def examples(self) -> str:
        return ", ".join(f"'{image}'" for image in islice(self._ids, 2)) + " …"

    def _image_id(self, name: str) -> str:
        """The id of an image that is named by its id or its file, as the user's tables name it."""
        return name if name in self._ids else self._files.find(name) or name


class _Files:
    """Finds images by the last parts of the paths of their files, such as ``images/a.jpg``."""

    def __init__(self) -> None:
        self._files: list[tuple[str, ImageRef]] = []
        self._by_end: dict[tuple[int, bool], dict[tuple[str, ...], set[str]]] = {}

    def add(self, image: str, ref: ImageRef) -> None:
        self._files.append((image, ref))

    def find(self, name: str) -> str | None:
        """The id of the only image with this file, exactly or in another case or Unicode form."""
        path = PurePosixPath(normpath(name.replace("\\", "/")))
        parts = tuple(part for part in path.parts if part != "..")
        for is_folded in (False, True) if parts else ():
            end = tuple(map(folded, parts)) if is_folded else parts
            by_end = self._ends(len(end), is_folded)
            images = by_end.get(end, set()) | by_end.get(("", end[-1]), set())
            if len(images) == 1:
                return next(iter(images))
        return None

    def _ends(self, length: int, is_folded: bool) -> dict[tuple[str, ...], set[str]]:
        """Images by the last parts of their paths; those without a path by ``("", name)``."""
        if (length, is_folded) not in self._by_end:
            by_end = self._by_end[length, is_folded] = defaultdict(set)
            for image, ref in self._files:
                whole: tuple[str, ...] = ("", ref.name)
                if isinstance(ref, FileImage):
                    whole = PurePosixPath(ref.path.as_posix()).parts
                end = whole[-length:] if length > 1 else (ref.name,)
                by_end[tuple(map(folded, end)) if is_folded else end].add(image)
        return self._by_end[length, is_folded]


def _has_decisions(path: Path) -> bool:
    """Whether a JSON Lines file has decisions, as one downloaded from a page has."""
    if path.suffix.lower() != ".jsonl":
        return False
    first = next(read_rows(path, ProblemLog()), None)
    return first is not None and "action" in first[1]


def _from_decisions(path: Path, index: _Index) -> CheckedCaptions:
    result = CheckedCaptions()
    log = DecisionLog(path)
    if not log.path.is_file():
        raise DataError(f"{path}: has no {LOG}; decide on its findings first, or name a table")
    result.damaged = log.damaged
    # decisions on captions that were elsewhere before, which replace no decision on their copies
    standings = sorted(log.standings().items(), key=lambda item: item[0] not in index.keys)
    for key, standing in standings:
        if standing.final is None:
            result.conflicts += 1
            continue
        matches = _captions_meant(key, index)
        result.unknown += not matches
        free = (one for one in matches if one[1] not in result.splits.get(one[0], {}))
        for split, number in islice(free, 1):
            result.splits.setdefault(split, {})[number] = standing.final.outcome[0] != "keep"
    return result


def _captions_meant(key: CaptionKey, index: _Index) -> list[tuple[str, int]]:
    return index.find(key.image, key.text, key.caption, key.split) or index.find(
        key.image, key.text, key.caption, None
    )


def _from_table(path: Path, index: _Index) -> CheckedCaptions:
    result, log = CheckedCaptions(), ProblemLog()
    lines: dict[tuple[str, int], int] = {}
    rows = [(line, _by_role(row)) for line, row in READERS[path.suffix.lower()](path, log)]
    texts_in = _column_of_texts([row for _, row in rows])
    for line, row in rows:
        where = f"{path}:{line}"
        if "image" not in row or "wrong" not in row or not row.keys() & {"text", "caption"}:
            headed = path.suffix.lower() in (".csv", ".tsv")
            raise DataError(
                f"{path if headed else where}: expected the columns image, wrong, and text or "
                f"caption, got {', '.join(map(str, row)) or 'none'}"
            )
        wrong = _label(row["wrong"], where)
        if wrong is None:
            continue
        image, text, split = str(row["image"]), _cell(row, texts_in), _cell(row, "split")
        if split and split not in index.splits:
            split = normalized_split(split)
        number = None if texts_in == "caption" else _number(row, where)
        matches = index.find(image, text, number, split) or index.find(
            unescape_formula(image), text and unescape_formula(text), number, split
        )
        result.unknown += not matches
        for name, number in matches:
            known = result.splits.setdefault(name, {})
            if known.setdefault(number, wrong) != wrong:
                raise DataError(
                    f"{where}: says the caption is {'wrong' if wrong else 'right'}, line "
                    f"{lines[name, number]} says the opposite; leave one of them out"
                )
            lines.setdefault((name, number), line)
    log.refuse_fatal()
    return result


def _by_role(row: dict[str, Any]) -> dict[str, Any]:
    """A row by what its columns are for: names are read as in a table of data, in any case."""
    row = {str(name).strip().lower(): value for name, value in row.items()}
    others = {"image": (*ALIASES["image"], *ALIASES["id"]), "split": ALIASES["split"]}
    if not row.keys() & {"text", "caption"}:
        others["text"] = ALIASES["captions"]
    for name, aliases in others.items():
        known = next((alias for alias in aliases if alias in row), None)
        if name not in row and known is not None:
            row[name] = row.pop(known)
    return row


def _column_of_texts(rows: Sequence[dict[str, Any]]) -> str:
    """``caption`` if it has texts, as in a table of captions to which labels were added."""
    if any("text" in row for row in rows):
        return "text"
    captions = (row.get("caption") for row in rows)
    given = [str(value) for value in captions if value is not None and value != ""]
    return "text" if all(map(_is_numeric, given)) else "caption"


def _is_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _label(value: Any, where: str) -> bool | None:
    """True for wrong captions, None for an empty cell."""
    text = "" if value is None else str(value).strip().lower()
    if not text:
        return None
    if text not in LABELS:
        raise DataError(
            f"{where}: wrong: expected true or false (also wrong/right, yes/no, 1/0), got {value!r}"
        )
    return LABELS[text]


def _cell(row: dict[str, Any], column: str) -> str | None:
    """A text that is given and not empty."""
    value = row.get(column)
    return None if value is None or value == "" else str(value)


def _number(row: dict[str, Any], where: str) -> int | None:
    value = row.get("caption")
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not str(value).strip().isdecimal():
        raise DataError(
            f"{where}: caption: expected its number among the captions of the image, from 0, got "
            f"{value!r}"
        )
    return int(value)
