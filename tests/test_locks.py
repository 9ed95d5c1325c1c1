"""Locks: one holder, who is named, and who cannot keep one after his end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from counterfoil.errors import BusyError
from counterfoil.locks import LOCK, Holder, Lock, beside, locked_folder, locked_in_turn
from counterfoil.locks import locked_target as locked

fcntl = pytest.importorskip("fcntl")  # nothing is locked on Windows

HOLD = """
import sys, time
from pathlib import Path
from counterfoil.locks import locked_folder
with locked_folder(Path(sys.argv[1]), "waiting"):
    print("held", flush=True)
    {after}
    time.sleep(60)
"""


def holding(folder: Path, after: str = "pass") -> subprocess.Popen[str]:
    """A process that holds the lock of a folder by the time this returns."""
    command = [sys.executable, "-c", HOLD.format(after=after), str(folder), "--token", "hush"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_process_is_told_which_one_holds_the_folder(tmp_path) -> None:
    process = holding(tmp_path)
    try:
        with pytest.raises(BusyError) as refused, locked_folder(tmp_path, "waiting", "be patient"):
            pytest.fail("two held it at once")
        text = str(refused.value)
        for part in (str(tmp_path), f"process {process.pid} ", socket.gethostname(), "UTC"):
            assert part in text
        assert f"{tmp_path} --token" in text  # its command, without what is secret in it
        assert "hush" not in text
        assert text.endswith("; be patient")
    finally:
        ended(process)


def test_a_killed_process_keeps_no_lock(tmp_path) -> None:
    ended(holding(tmp_path))
    assert (tmp_path / LOCK).exists()  # what it left is no obstacle
    with locked_folder(tmp_path, "waiting"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_forked_worker_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path) -> None:
    fork = (
        "import os; child = os.fork()\n"
        "    if child == 0: print(os.getpid(), flush=True); time.sleep(60); os._exit(0)"
    )
    process = holding(tmp_path, fork)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        ended(process)
        os.kill(worker, 0)  # it is still there
        with locked_folder(tmp_path, "waiting"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_process_that_ends_leaves_the_lock_to_its_parent(tmp_path) -> None:
    with locked_folder(tmp_path, "waiting"):
        child = os.fork()
        if child == 0:
            try:
                with locked_folder(tmp_path, "waiting"):
                    os._exit(1)
            except BusyError as error:
                os._exit(0 if str(os.getppid()) in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert Lock(tmp_path / LOCK).is_held()


def test_of_many_that_come_at_once_to_a_new_folder_one_holds_it(tmp_path) -> None:
    """Each takes and frees the lock again and again; inside, it is always alone."""
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from counterfoil.errors import BusyError\n"
        "from counterfoil.locks import locked_folder\n"
        "folder = Path(sys.argv[1])\ntaken = 0\nend = time.monotonic() + 20\n"
        "while taken < 30 and time.monotonic() < end:\n"
        "    try:\n"
        "        with locked_folder(folder / 'new', 'waiting'):\n"
        "            (folder / 'inside').touch(exist_ok=False)\n"
        "            time.sleep(0.0005)\n"
        "            (folder / 'inside').unlink()\n"
        "            taken += 1\n"
        "    except BusyError:\n"
        "        pass\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    some = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate(timeout=60)[1] for process in some]
    assert [process.returncode for process in some] == [0, 0, 0], told
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "new"])


def test_the_thread_that_holds_a_lock_may_take_it_again_and_another_thread_may_not(
    tmp_path,
) -> None:
    refused = []

    def other() -> None:
        with pytest.raises(BusyError), locked(tmp_path / "file", "writing"):
            pass
        refused.append(True)

    with locked(tmp_path / "file", "writing"):
        with locked(tmp_path / ".." / tmp_path.name / "file", "writing"):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused == [True]


def test_only_one_at_a_time_writes_where_others_wait(tmp_path) -> None:
    entered = threading.Event()

    def write() -> None:
        with locked_in_turn(tmp_path / LOCK, "writing"):
            entered.set()

    other = threading.Thread(target=write)
    with locked_in_turn(tmp_path / LOCK, "writing"):
        other.start()
        assert not entered.wait(0.3)
    assert entered.wait(30)
    other.join()


def test_where_nothing_can_be_locked_nobody_is_refused(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Lock(tmp_path / LOCK), Lock(tmp_path / LOCK)
    assert first.try_acquire()
    assert second.try_acquire()
    first.release()
    second.release()
    with locked_folder(tmp_path, "waiting"), locked_in_turn(beside(tmp_path), "waiting"):
        pass


def test_a_lock_file_of_another_form_names_nobody(tmp_path) -> None:
    path = tmp_path / LOCK
    for text in ("", "{}", "[]", '{"pid": "x", "host": "", "since": "", "command": ""}', "\0"):
        path.write_text(text)
        assert Holder.read(path) is None
    assert Holder.read(tmp_path / "none") is None


def test_a_folder_made_for_a_lock_alone_goes_with_it(tmp_path) -> None:
    with locked_folder(tmp_path / "new", "waiting"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
