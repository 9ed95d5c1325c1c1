"""Records of JSON, JSON Lines, CSV and Parquet files whose fields are checked when they are read.

Files come from elsewhere: sizes are bounded, also of what gzip unpacks, and every error names the
file, the item and the field.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from counterfoil.core.errors import DataError
from counterfoil.core.printable import printable
from counterfoil.core.storage.reading import JSON_BYTES, LINE_BYTES, read_unpacked
from counterfoil.data.formats.parquet import read_parquet
from counterfoil.data.pairs import ProblemLog
from counterfoil.data.text.words import MOST_LETTERS

_FLAGS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class BytesImage:
    """An encoded image that came inside a file."""

    name: str
    data: bytes

    def read(self) -> bytes:
        return self.data


class RepeatedKeys(dict[str, Any]):
    """A JSON object with keys that appear twice, of which Python would silently drop the first."""

    def __init__(self, pairs: Sequence[tuple[str, Any]], repeated: str) -> None:
        super().__init__(pairs)
        self.repeated = repeated


@dataclass(frozen=True)
class Record:
    """The fields of one item; ``prefix`` leads to an object inside the item."""

    path: Path
    key: str
    values: Any
    prefix: str = ""

    def fail(self, name: str, message: str) -> NoReturn:
        full_name = f"{self.prefix}{name}".removesuffix(".")
        field = f", field '{full_name}'" if full_name else ""
        text = f"{self.path}: item '{_short(self.key)}'{field}: {message}"
        raise DataError(printable(text))

    def checked(self) -> Record:
        """This record, if it is an object without repeated keys."""
        if not isinstance(self.values, dict):
            self.fail("", f"expected an object, got {_kind(self.values)}")
        if isinstance(self.values, RepeatedKeys):
            self.fail(self.values.repeated, "appears twice in this item; keep one")
        return self

    def has(self, name: str) -> bool:
        return name in self.checked().values

    def entries(self) -> list[Record]:
        """The records of an item that is a list."""
        if not isinstance(self.values, list):
            self.fail("", f"expected a list, got {_kind(self.values)}")
        return [
            Record(self.path, f"{self.key}[{number}]", values)
            for number, values in enumerate(self.values)
        ]

    def value(self, name: str) -> Any:
        if not self.has(name):
            known = ", ".join(map(_short, list(self.values)[:12])) or "none"
            self.fail(name, f"missing (the item has: {known})")
        return self.values[name]

    def text(self, name: str) -> str:
        """A text with at least one visible character."""
        return self._text(name, self.value(name))

    def optional_text(self, name: str) -> str:
        value = self.value(name) if self.has(name) else None
        return "" if value is None or value == "" else self._text(name, value)

    def texts(self, name: str) -> list[str]:
        """A list of at least one text."""
        value = self.value(name)
        if not isinstance(value, list) or not value:
            self.fail(name, f"expected a list of texts, got {_kind(value)}")
        return [self._text(f"{name}[{number}]", text) for number, text in enumerate(value)]

    def row(self, names: Sequence[str]) -> list[str]:
        """An item that is a list of texts instead of an object."""
        if not isinstance(self.values, list) or len(self.values) != len(names):
            expected = f"a list of {len(names)} texts ({', '.join(names)})"
            self.fail("", f"expected {expected}, got {_kind(self.values)}")
        return [self._text(name, value) for name, value in zip(names, self.values, strict=True)]

    def number(self, name: str) -> float:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(name, f"expected a number, got {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(name, "expected a finite number")
        return number

    def flag(self, name: str) -> bool:
        """True or false, also as the text of a table."""
        value = self.value(name)
        if isinstance(value, bool):
            return value
        known = _FLAGS.get(str(value).strip().lower()) if isinstance(value, str | int) else None
        if known is None:
            self.fail(name, f"expected true or false, got {_kind(value)}")
        return known

    def inner(self, name: str) -> Record:
        """The object in a field."""
        return Record(self.path, self.key, self.value(name), f"{self.prefix}{name}.").checked()

    def image_bytes(self, name: str) -> bytes:
        """An encoded image, plain or as ``{"bytes": …, "path": …}``."""
        value = self.value(name)
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes) or not data:
            self.fail(name, "expected the bytes of an image")
        return data

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            self.fail(name, f"expected text, got {_kind(value)}")
        if not value.strip():
            self.fail(name, "expected text, got none")
        if len(value) > MOST_LETTERS:
            self.fail(name, f"{len(value):,} characters, at most {MOST_LETTERS:,} are read")
        return value


def read_records(path: Path) -> list[Record]:
    """The items of a file: values of an object, entries of a list, lines, or rows of a table."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet_records(path)
    text = _read_text(path)
    name = name.removesuffix(".gz")
    if name.endswith(".csv"):
        return _non_empty(path, list(_csv_records(path, text)))
    if name.endswith(".jsonl"):
        lines = enumerate(text.split("\n"), start=1)
        parsed = [(n, _parse(line, path, n)) for n, line in lines if line.strip()]
        return _non_empty(path, [Record(path, f"line {n}", values) for n, values in parsed])
    return _json_records(path, _parse(text, path))


def _json_records(path: Path, tree: Any) -> list[Record]:
    if isinstance(tree, RepeatedKeys):
        raise DataError(f"{path}: the key '{_short(tree.repeated)}' appears twice; keep one")
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [(str(number), value) for number, value in enumerate(tree)]
    else:
        raise DataError(f"{path}: expected an object or a list of items, got {_kind(tree)}")
    return _non_empty(path, [Record(path, key, value) for key, value in items])


def _non_empty(path: Path, records: list[Record]) -> list[Record]:
    if not records:
        raise DataError(f"{path}: no items")
    return records


def _parquet_records(path: Path) -> list[Record]:
    log = ProblemLog()
    records = [Record(path, f"row {number}", row) for number, row in read_parquet(path, log)]
    log.refuse_fatal()
    return _non_empty(path, records)


def _csv_records(path: Path, text: str) -> Iterator[Record]:
    limit = csv.field_size_limit(LINE_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        names = reader.fieldnames or []
        if not names:
            raise DataError(f"{path}: empty; expected a header and rows")
        if repeated := next((name for name, n in Counter(names).items() if n > 1), None):
            raise DataError(f"{path}: the column '{_short(repeated)}' appears twice; keep one")
        for number, row in enumerate(reader, start=1):
            record = Record(path, f"row {number}", row)
            short = next((name for name in names if row[name] is None), None)
            if short is not None:
                record.fail(short, "missing: the row has fewer fields than the header")
            if None in row:
                record.fail("", f"has more than the {len(names)} fields of the header")
            yield record
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not CSV ({error})") from None
    finally:
        csv.field_size_limit(limit)


def _read_text(path: Path) -> str:
    try:
        return read_unpacked(path, JSON_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parse(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {line or error.lineno}, column {error.colno}"
        raise DataError(f"{path}: {where}: not JSON ({error.msg}); is it cut short?") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON ({_short(str(error))})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    counts = Counter(key for key, _ in pairs)
    return RepeatedKeys(pairs, next(key for key, count in counts.items() if count > 1))


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return f"the number {_short(value)}"
    if isinstance(value, str):
        return f"the text '{_short(value)}'"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else type(value).__name__
