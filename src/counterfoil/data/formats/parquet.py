"""Read rows of a Parquet file with bounded memory.

Repeated values are stored once (in a dictionary, or as a difference to the previous value), so a
few kilobytes can become gigabytes of text. Dictionaries therefore stay encoded until a few rows at
a time become Python objects, and equal long texts become one object.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterfoil.core.errors import MissingExtraError
from counterfoil.core.storage.reading import GIB, KIB, LINE_BYTES, LINES_BYTES, MIB, open_regular
from counterfoil.data.pairs import ProblemLog

Row = tuple[int, dict[str, Any]]

MAX_ROWS = 50_000_000
"""Limit of rows of a file, and of values of a column; rows may take no space in the file."""

COLUMN_BYTES = GIB
"""Limit of a decompressed column of a row group, since whole pages are in memory."""

_BATCH_ROWS = 4096
_BATCH_BYTES = 64 * MIB
_LONG = 4 * KIB  # texts above this size are shared


class _LimitError(Exception):
    """A table beyond a limit, which the message names."""


def read_parquet(path: Path, log: ProblemLog) -> Iterator[Row]:
    """All rows, numbered from one; faults are logged."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", "reading Parquet files") from None
    try:
        with open_regular(path, LINES_BYTES) as stream:
            with pyarrow.parquet.ParquetFile(stream) as file:
                metadata = file.metadata
                _check_size(metadata)
                rows, dictionaries = _batch_rows(metadata), _dictionaries(metadata)
            stream.seek(0)
            with pyarrow.parquet.ParquetFile(stream, read_dictionary=dictionaries) as file:
                batches = file.iter_batches(batch_size=rows)
                yield from enumerate(_records(batches), start=1)
    except FileNotFoundError:
        log.fatal("missing-file", path, "no such file")
    except _LimitError as error:
        log.fatal("large-table", path, str(error))
    except Exception as error:  # damaged files make the reader raise nearly anything
        log.fatal("bad-parquet", path, f"not a readable Parquet file ({error})")


def _columns(metadata: Any) -> Iterator[Any]:
    """Every column of every row group."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in range(group.num_columns):
            yield group.column(column)


def _check_size(metadata: Any) -> None:
    """Refuse a table whose decompressed size, as its metadata say, is beyond the limits."""
    size = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
    if metadata.num_rows > MAX_ROWS or size > LINES_BYTES:
        raise _LimitError(
            f"{metadata.num_rows} rows and {size} bytes once decompressed; at most {MAX_ROWS} rows "
            f"and {LINES_BYTES} bytes are read"
        )
    for column in _columns(metadata):
        if column.total_uncompressed_size > COLUMN_BYTES or column.num_values > MAX_ROWS:
            raise _LimitError(
                f"column '{column.path_in_schema}' has {column.num_values} values and "
                f"{column.total_uncompressed_size} bytes in a row group; at most {MAX_ROWS} values "
                f"and {COLUMN_BYTES} bytes are read: write smaller row groups"
            )


def _dictionaries(metadata: Any) -> list[str]:
    """Text columns with dictionary encoding."""
    return sorted(
        {
            column.path_in_schema
            for column in _columns(metadata)
            if column.physical_type == "BYTE_ARRAY"
            and any("DICTIONARY" in encoding for encoding in column.encodings)
        }
    )


def _batch_rows(metadata: Any) -> int:
    """Rows to decode at once; with delta encoding, each text can be as long as a page."""
    longest = max(
        (
            column.total_uncompressed_size
            for column in _columns(metadata)
            if "DELTA_BYTE_ARRAY" in column.encodings
        ),
        default=0,
    )
    return min(_BATCH_ROWS, max(1, _BATCH_BYTES // longest)) if longest else _BATCH_ROWS


def _records(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    texts = _Texts()
    for batch in batches:
        for piece in _pieces(batch):
            for record in piece.to_pylist():
                yield {key: texts.shared(_plain(value)) for key, value in record.items()}


class _Texts:
    """Long texts by value, so that repeated ones take memory once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._size = 0

    def shared(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.shared(item) for item in value]
        if not isinstance(value, str) or len(value) <= _LONG:
            return value
        if value not in self._known:
            self._known[value] = value
            self._size += len(value)
            if self._size > LINES_BYTES:
                raise _LimitError(f"more than {LINES_BYTES} bytes of text once unpacked")
        return self._known[value]


def _pieces(batch: Any) -> Iterator[Any]:
    """Parts of a batch that stay small as Python objects."""
    size = sum(_expanded(column) for column in batch.columns)
    if size <= _BATCH_BYTES and batch.num_rows <= _BATCH_ROWS:
        yield batch
    elif batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _pieces(batch.slice(0, half))
        yield from _pieces(batch.slice(half))
    else:
        raise _LimitError(f"a row of more than {_BATCH_BYTES} bytes once unpacked")


def _expanded(array: Any) -> int:
    """Upper bound of the bytes of an array with its dictionaries decoded."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = pyarrow.compute.binary_length(array.dictionary)
        longest = pyarrow.compute.max(lengths).as_py() or 0
        if longest > LINE_BYTES:
            raise _LimitError(f"a text of {longest} bytes; at most {LINE_BYTES} are read")
        return len(array) * longest
    if pyarrow.types.is_struct(kind):
        return sum(map(_expanded, array.flatten()))
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _expanded(array.flatten())
    return int(array.nbytes)


def _plain(value: Any) -> Any:
    """Dates, decimals and the like as text, so that every extra can be written as JSON."""
    known = isinstance(value, str | int | float | list | dict | None)
    return value if known else str(value)
