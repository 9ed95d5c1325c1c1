"""Files that users name: regular ones are read within limits, others refused without waiting."""

from __future__ import annotations

import gc
import gzip
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from counterfoil.core.storage.reading import (
    open_descriptor,
    open_regular,
    read_bytes,
    read_lines,
    read_text,
    read_unpacked,
)
from tests.special import SPECIAL, make_special, within


@pytest.mark.parametrize("kind", [*SPECIAL, "folder"])
def test_only_regular_files_are_opened_and_a_fifo_is_not_waited_for(kind, tmp_path) -> None:
    path = make_special(kind, tmp_path / "a.txt")
    gc.collect()  # files that earlier tests left open are closed now, not meanwhile
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for opener in (open_regular, open_descriptor, read_text, lambda p: read_bytes(p, 10)):
        with pytest.raises(OSError, match=r"regular file|folder"):
            within(20, lambda opener=opener: opener(path))
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_socket_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as here:
        here.bind("s")
        with pytest.raises(OSError, match="s"):
            within(20, lambda: open_regular(tmp_path / "s"))


def test_a_regular_file_behind_links_is_read_and_blocks_as_any_other(tmp_path) -> None:
    (tmp_path / "a").write_text("één\r\ntwo")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "b") == "één\ntwo"
    with open_regular(tmp_path / "b") as file:
        assert os.get_blocking(file.fileno())


def test_a_file_above_its_limit_is_refused_before_it_is_read(tmp_path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(OSError, match="too large"):
        read_text(path)
    small = tmp_path / "small"
    small.write_bytes(b"12345")
    assert read_bytes(small, 5) == b"12345"
    with pytest.raises(OSError, match="too large: 5 bytes, at most 4 bytes"):
        read_bytes(small, 4)


def test_a_gzip_file_is_unpacked_within_its_limit(tmp_path) -> None:
    path, text = tmp_path / "a.txt", os.urandom(1000).hex().encode() * 20
    path.write_bytes(text)
    assert read_unpacked(path, len(text)) == text
    path.write_bytes(gzip.compress(text))
    assert read_unpacked(path, len(text)) == text
    with pytest.raises(OSError, match=r"too large: more than 39\.1 KiB once unpacked"):
        read_unpacked(path, len(text) - 1)
    path.write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(OSError, match="not a whole gzip file"):
        read_unpacked(path, len(text))


def test_a_line_that_never_ends_is_refused(tmp_path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"ab\n" + b"x" * 100 + b"\n")
    with open_regular(path) as file:
        lines = read_lines(file, path, 10)
        assert next(lines) == b"ab\n"
        with pytest.raises(OSError, match="a line of more than 10 bytes"):
            next(lines)


def test_a_small_file_does_not_reserve_the_memory_of_its_limit(tmp_path) -> None:
    path = tmp_path / "small.json"
    path.write_bytes(b"{}" * 1000)
    tracemalloc.start()
    try:
        assert read_bytes(path, 2**28) == b"{}" * 1000
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_grows_after_it_was_measured_is_read_to_its_end_or_refused(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "growing"
    path.write_bytes(bytes(range(256)) * 10_000)
    monkeypatch.setattr(os, "fstat", _StatOfAnEmptyFile(os.fstat))
    assert read_bytes(path, 2_560_000) == path.read_bytes()
    with pytest.raises(OSError, match="too large"):
        read_bytes(path, 2_559_999)


class _StatOfAnEmptyFile:
    """Answers as the system did before a file was written to."""

    def __init__(self, fstat) -> None:
        self.fstat = fstat

    def __call__(self, descriptor: int) -> os.stat_result:
        fields = list(self.fstat(descriptor))
        fields[6] = 0
        return os.stat_result(fields)
