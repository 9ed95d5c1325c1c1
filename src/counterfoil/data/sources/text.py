"""Text files as numbered lines: UTF-8, split at line feeds only, a stray byte reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterfoil.data.problems import ProblemLog
from counterfoil.reading import JSON_BYTES, LINES_BYTES, open_regular, read_bytes
from counterfoil.reading import read_lines as bounded_lines


def read_raw_lines(path: Path, log: ProblemLog) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends; a byte order mark is left out."""
    try:
        with open_regular(path, LINES_BYTES) as file:
            for number, line in enumerate(bounded_lines(file, path), start=1):
                yield number, decode(line, path, number, log)
    except FileNotFoundError:
        log.fatal("missing-file", path, "no such file")
    except OSError as error:
        log.fatal("unreadable-file", path, f"cannot be read ({error.strerror})")


def read_lines(path: Path, log: ProblemLog) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends, whether those are LF or CR LF."""
    for number, line in read_raw_lines(path, log):
        yield number, line.removesuffix("\n").removesuffix("\r")


def decode(data: bytes, path: Path, number: int, log: ProblemLog) -> str:
    """One line (or the whole of a small text) as a string; bad bytes are logged and replaced."""
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
        place = line or data.count(b"\n", 0, error.start) + 1
        log.fatal(
            "bad-encoding",
            f"{path}:{place}",
            f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8",
        )
    except json.JSONDecodeError as error:
        log.fatal("bad-json", f"{path}:{line or error.lineno}", f"not JSON ({error})")
    except (ValueError, RecursionError) as error:
        log.fatal("bad-json", f"{path}:{line or 1}", f"not JSON ({error})")
    return None
