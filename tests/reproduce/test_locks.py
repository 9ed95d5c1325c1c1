"""Calls that write into one folder wait for one another, where folders can be locked."""

from __future__ import annotations

import errno
import threading

import pytest

from counterfoil.reproduce.locks import one_at_a_time

fcntl = pytest.importorskip("fcntl")  # nothing is locked on Windows


def test_only_one_at_a_time_writes_into_a_folder(tmp_path) -> None:
    entered = threading.Event()

    def write() -> None:
        with one_at_a_time(tmp_path):
            entered.set()

    other = threading.Thread(target=write)
    with one_at_a_time(tmp_path):
        other.start()
        assert not entered.wait(0.3)
    assert entered.wait(30)
    other.join()


def test_a_folder_that_cannot_be_locked_is_written_to_all_the_same(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with one_at_a_time(tmp_path):
        (tmp_path / "file").touch()
