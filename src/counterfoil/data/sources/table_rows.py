"""Rows of CSV, TSV, JSON Lines and Parquet files, each with its line number."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.parquet_rows import Row, read_parquet
from counterfoil.data.sources.text import parse_json, read_raw_lines
from counterfoil.reading import LINE_BYTES

_FIELD_LIMIT = LINE_BYTES


def read_rows(path: Path, log: ProblemLog) -> Iterator[Row]:
    """All rows of a table, whatever its kind; faults are logged and the rest is read."""
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


def _read_csv(path: Path, log: ProblemLog) -> Iterator[Row]:
    lines = [line for _, line in read_raw_lines(path, log)]
    header = lines[0] if lines else ""
    delimiter = max(",;\t|", key=header.count)
    yield from _delimited(path, lines, log, delimiter=delimiter, quoted=True)


def _read_tsv(path: Path, log: ProblemLog) -> Iterator[Row]:
    """Tab-separated values come with and without quoting; the file itself decides."""
    lines = [line for _, line in read_raw_lines(path, log)]
    trial = ProblemLog()
    rows = list(_delimited(path, lines, trial, delimiter="\t", quoted=True))
    if trial.problems:
        yield from _delimited(path, lines, log, delimiter="\t", quoted=False)
    else:
        yield from rows


def _delimited(
    path: Path, lines: list[str], log: ProblemLog, *, delimiter: str, quoted: bool
) -> Iterator[Row]:
    if quoted:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
    else:
        reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
    header: list[str] | None = None
    with _long_fields():
        start = 1
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                log.fatal("bad-row", f"{path}:{reader.line_num}", f"not readable ({error})")
                start = reader.line_num + 1
                continue
            if header is None:
                header = [name.strip() for name in fields]
            elif fields and len(fields) != len(header):
                log.fatal(
                    "bad-row",
                    f"{path}:{start}",
                    f"{len(fields)} fields, but the header names {len(header)} columns"
                    + ("; put a text with the separator in it in quotes" if quoted else ""),
                )
            elif fields:
                yield start, dict(zip(header, fields, strict=True))
            start = reader.line_num + 1


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a very long caption be read, so that it can be reported as one."""
    before = csv.field_size_limit(_FIELD_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(before)


READERS: dict[str, Callable[[Path, ProblemLog], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".txt": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": read_parquet,
}
