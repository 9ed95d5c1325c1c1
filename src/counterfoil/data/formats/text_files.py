"""Read text files as numbered lines, JSON or table rows; invalid UTF-8 is logged."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from counterfoil.core.storage.reading import (
    JSON_BYTES,
    LINE_BYTES,
    LINES_BYTES,
    open_regular,
    read_bytes,
)
from counterfoil.core.storage.reading import read_lines as bounded_lines
from counterfoil.data.formats.parquet import Row, read_parquet
from counterfoil.data.pairs import ProblemLog

if TYPE_CHECKING:
    from _csv import Reader

EXTRAS = "extras"
_FIELD_LIMIT = LINE_BYTES
_QUOTE_ADVICE = "; put a text with the separator in it in quotes"


def read_raw_lines(path: Path, log: ProblemLog) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends; a byte order mark is left out."""
    try:
        with open_regular(path, LINES_BYTES) as file:
            for number, line in enumerate(bounded_lines(file, path), start=1):
                if number == 1 and (encoding := _wide_encoding(line)):
                    log.fatal("bad-encoding", path, f"{encoding}, not UTF-8; save it as UTF-8")
                    return
                yield number, decode(line, path, number, log)
    except FileNotFoundError:
        log.fatal("missing-file", path, "no such file")
    except OSError as error:
        log.fatal("unreadable-file", path, f"cannot be read ({error.strerror})")


def _wide_encoding(start: bytes) -> str | None:
    """What a file is encoded in if its first line is UTF-16 or UTF-32.

    In UTF-8 every line of it would be wrong, so it is better to say it once.
    """
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    zeros = sorted(start[side:64:2].count(0) for side in (0, 1))  # of Latin letters, every other
    return "looks like UTF-16" if zeros[0] == 0 and zeros[1] > 8 else None


def read_lines(path: Path, log: ProblemLog) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends, whether those are LF or CR LF."""
    for number, line in read_raw_lines(path, log):
        yield number, line.removesuffix("\n").removesuffix("\r")


def decode(data: bytes, path: Path, number: int, log: ProblemLog) -> str:
    """One line (or a whole small text) as a string; invalid bytes are logged and replaced."""
    if number == 1:
        data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        log.fatal(
            "bad-encoding",
            f"{path}:{number}",
            f"not UTF-8: byte 0x{data[error.start]:02x} at position {error.start + 1}; "
            "save the file as UTF-8",
        )
        return data.decode(errors="replace")


def read_json(path: Path, log: ProblemLog) -> Any:
    """A whole JSON file, or None with the reason logged."""
    try:
        data = read_bytes(path, JSON_BYTES)
    except FileNotFoundError:
        log.fatal("missing-file", path, "no such file")
        return None
    except OSError as error:
        log.fatal("unreadable-file", path, f"cannot be read ({error.strerror})")
        return None
    return parse_json(data, path, log)


def parse_json(data: bytes, path: object, log: ProblemLog, line: int | None = None) -> Any:
    """JSON from bytes, or None with the reason logged; ``line`` if they are one line of a file."""
    try:
        return json.loads(data.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        number = line or data.count(b"\n", 0, error.start) + 1
        log.fatal(
            "bad-encoding",
            f"{path}:{number}",
            f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8",
        )
    except json.JSONDecodeError as error:
        log.fatal("bad-json", f"{path}:{line or error.lineno}", f"not JSON ({error})")
    except (ValueError, RecursionError) as error:
        log.fatal("bad-json", f"{path}:{line or 1}", f"not JSON ({error})")
    return None


# JSON as this library writes it: one object per line, UTF-8, any string.


def json_bytes(value: Any) -> bytes:
    """Readable UTF-8; ASCII with escapes if a string has a lone surrogate."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def merge_extras(
    record: dict[str, Any], extras: dict[str, Any], reserved: frozenset[str]
) -> dict[str, Any]:
    """Add extras beside a record's own keys, or under ``extras`` if one has a reserved name."""
    if any(key.strip().lower() in reserved or key == EXTRAS for key in extras):
        return {**record, EXTRAS: extras}
    return {**record, **extras}


def split_extras(rest: dict[str, Any]) -> dict[str, Any]:
    """Undo `merge_extras`; ``rest`` is the record without its own keys."""
    nested = rest.get(EXTRAS)
    if isinstance(nested, dict):
        return {**{key: value for key, value in rest.items() if key != EXTRAS}, **nested}
    return rest


# Rows of CSV, TSV, JSON Lines and Parquet files, each with its line number.


def read_rows(path: Path, log: ProblemLog) -> Iterator[Row]:
    """All rows of a table of any kind; faults are logged, and reading goes on."""
    return READERS[path.suffix.lower()](path, log)


def _read_json_lines(path: Path, log: ProblemLog) -> Iterator[Row]:
    for number, line in read_raw_lines(path, log):
        if not line.strip():
            continue
        record = parse_json(line.encode(), path, log, number)
        if isinstance(record, dict):
            yield number, record
        elif record is not None:
            log.fatal("bad-json", f"{path}:{number}", "expected an object")


@dataclass(frozen=True)
class Dialect:
    """How a delimited table is written; ``header`` is the index of the line with the columns."""

    delimiter: str
    is_quoted: bool = True
    header: int = 0

    def reader(self, lines: Sequence[str]) -> Reader:
        """A reader of the records from the header on; it counts lines from the header, too."""
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.is_quoted else csv.QUOTE_NONE
        return csv.reader(
            islice(lines, self.header, None),
            delimiter=self.delimiter,
            quoting=quoting,
            strict=True,
        )


def dialect_of(path: Path, lines: list[str]) -> Dialect:
    """The dialect of a table's lines. Fields of a TSV are quoted unless that cannot be read.

    Excel takes the separator from a first line such as ``sep=;``, which is no row of the table.
    """
    stated = _SEPARATOR_LINE.fullmatch(lines[0].strip("\r\n")) if lines else None
    rows = range(int(stated is not None), len(lines))
    header = next((number for number in rows if lines[number].strip("\r\n")), len(lines))
    if path.suffix.lower() != ".tsv":
        first = lines[header] if header < len(lines) else ""
        return Dialect(stated[1] if stated else max(",;\t|", key=first.count), header=header)
    quoted = Dialect(stated[1] if stated else "\t", header=header)
    trial = ProblemLog()
    for _ in _delimited(path, lines, trial, quoted):
        pass
    return replace(quoted, is_quoted=not trial.problems)


_SEPARATOR_LINE = re.compile(r'"?sep=([^\w"\r\n])"?[,;\t|]*', re.IGNORECASE)


def _read_delimited(path: Path, log: ProblemLog) -> Iterator[Row]:
    lines = [line for _, line in read_raw_lines(path, log)]
    yield from _delimited(path, lines, log, dialect_of(path, lines))


def _delimited(path: Path, lines: list[str], log: ProblemLog, dialect: Dialect) -> Iterator[Row]:
    header: list[str] | None = None
    with long_fields():
        reader = dialect.reader(lines)
        start = dialect.header + 1
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                line, message = dialect.header + reader.line_num, f"not readable ({error})"
                if "new-line character" in str(error):
                    message = (
                        "a line ends in CR alone; save the file with the line ends LF or CR LF"
                    )
                if dialect.is_quoted and (
                    fault := _quote_fault(lines, start, line, dialect.delimiter)
                ):
                    line, message = fault
                log.fatal("bad-row", f"{path}:{line}", message)
                start = dialect.header + reader.line_num + 1
                continue
            if header is None:
                header = [name.strip() for name in fields]
                counts = Counter(filter(None, header))
                if twice := next((name for name, count in counts.items() if count > 1), None):
                    log.fatal("bad-row", f"{path}:{start}", f"names the column '{twice}' twice")
            elif fields and len(fields) != len(header):
                log.fatal(
                    "bad-row",
                    f"{path}:{start}",
                    f"{len(fields)} fields, but the header names {len(header)} columns"
                    + (_QUOTE_ADVICE if dialect.is_quoted else ""),
                )
            elif fields:
                yield start, dict(zip(header, fields, strict=True))
            start = dialect.header + reader.line_num + 1


def _quote_fault(lines: list[str], start: int, end: int, delimiter: str) -> tuple[int, str] | None:
    """Line and message of the badly quoted field in lines ``start`` to ``end``; None without one.

    The reader fails at the end of the file or at the next quote, maybe many lines further down.
    """
    text = "".join(lines[start - 1 : end])
    advice = 'close it at the end of the text, and double each quote within the text ("")'
    for field in re.finditer(rf'(?:^|{re.escape(delimiter)})"(?:[^"]+|"")*("?)', text, re.M):
        line = start + text.count("\n", 0, field.start())
        if not field[1]:
            return line, f'the quote (") that opens a field here is never closed; {advice}'
        if text[field.end() : field.end() + 1] not in (delimiter, "\r", "\n", ""):
            last = start + text.count("\n", 0, field.end())
            return line, (
                f'the quote (") that opens a field here is followed, in line {last}, by one that '
                f"does not end the field; {advice}"
            )
    return None


def csv_row(fields: Sequence[object]) -> str:
    """A record of a CSV file; a text with any line break is in quotes."""
    buffer = io.StringIO(newline="")
    # The writer only puts those line breaks in quotes that are part of its own line end.
    csv.writer(buffer, lineterminator="\r\n").writerow(fields)
    return buffer.getvalue().removesuffix("\r\n") + "\n"


@contextmanager
def long_fields() -> Iterator[None]:
    """Raise the field limit, so that a very long caption is read and then reported."""
    before = csv.field_size_limit(_FIELD_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(before)


READERS: dict[str, Callable[[Path, ProblemLog], Iterator[Row]]] = {
    ".csv": _read_delimited,
    ".txt": _read_delimited,
    ".tsv": _read_delimited,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": read_parquet,
}
