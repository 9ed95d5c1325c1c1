"""Rows of CSV, TSV, JSON Lines and Parquet files, each with its line number."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.text import parse_json, read_raw_lines
from counterfoil.errors import MissingExtraError
from counterfoil.reading import LINE_BYTES, LINES_BYTES, open_regular

Row = tuple[int, dict[str, Any]]

_FIELD_LIMIT = LINE_BYTES
MAX_ROWS = 50_000_000
"""Of a Parquet file, whose rows need not take any space in it."""


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
                    f"{len(fields)} fields, but the header names {len(header)} columns",
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


def _read_parquet(path: Path, log: ProblemLog) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", "reading Parquet files") from None
    try:
        number = 1
        with open_regular(path, LINES_BYTES) as stream, pyarrow.parquet.ParquetFile(stream) as file:
            if not _fits(file.metadata, path, log):
                return
            for batch in file.iter_batches(batch_size=4096):
                for record in batch.to_pylist():
                    yield number, {key: _plain(value) for key, value in record.items()}
                    number += 1
    except FileNotFoundError:
        log.fatal("missing-file", path, "no such file")
    except Exception as error:  # damaged files make the reader raise nearly anything
        log.fatal("bad-parquet", path, f"not a readable Parquet file ({error})")


def _fits(metadata: Any, path: Path, log: ProblemLog) -> bool:
    """Whether a table is within the limits once decompressed, as its own metadata say."""
    size = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
    if metadata.num_rows <= MAX_ROWS and size <= LINES_BYTES:
        return True
    log.fatal(
        "large-table",
        path,
        f"{metadata.num_rows} rows and {size} bytes once decompressed; at most {MAX_ROWS} rows and "
        f"{LINES_BYTES} bytes are read",
    )
    return False


def _plain(value: Any) -> Any:
    """Dates, decimals and the like as text, so that every extra can be written as JSON."""
    known = isinstance(value, str | int | float | list | dict | None)
    return value if known else str(value)


READERS: dict[str, Callable[[Path, ProblemLog], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".txt": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
}
