"""Locks: one holder, who is named, and who cannot keep one after his end."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from counterfoil.core.errors import BusyError
from counterfoil.core.storage import locks
from counterfoil.core.storage.locks import LOCK, Holder, Lock, beside, locked_folder, locked_in_turn
from counterfoil.core.storage.locks import locked_target as locked
from tests.unprivileged import open_folder, run_without_write_permission

fcntl = pytest.importorskip("fcntl")  # nothing is locked on Windows

HOLD = """
import sys, time
from pathlib import Path
from counterfoil.core.storage.locks import locked_folder
with locked_folder(Path(sys.argv[1]), "waiting"):
    print("held", flush=True)
    {after}
    time.sleep(600)
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
        "    if child == 0: print(os.getpid(), flush=True); time.sleep(600); os._exit(0)"
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


def test_a_folder_that_goes_away_while_it_is_made_is_made_again(tmp_path, monkeypatch) -> None:
    """`Path.mkdir` raises if a folder is there at first and gone when it looks for it."""
    mkdir, seen = Path.mkdir, []

    def made_by_another(path: Path, *args, **kwargs) -> None:
        if len(seen) < 3:
            seen.append(path)
            raise FileExistsError(17, "File exists", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", made_by_another)
    with locked_folder(tmp_path / "new", "waiting"):
        assert seen == [tmp_path / "new"] * 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), locked_folder(tmp_path / "file", "waiting"):
        pass


def test_of_many_that_come_at_once_to_a_new_folder_one_holds_it(tmp_path) -> None:
    """Each takes and frees the lock again and again; inside, it is always alone."""
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from counterfoil.core.errors import BusyError\n"
        "from counterfoil.core.storage.locks import locked_folder\n"
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
    told = [process.communicate(timeout=180)[1] for process in some]
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


@pytest.mark.parametrize(
    "use",
    [
        "locked_folder(folder, 'training a run there')",
        "locked_target(folder / 'file', 'writing foils to it')",
        "locked_in_turn(folder / '.lock', 'drawing')",
        "locked_folder(folder / 'new', 'training a run there')",
    ],
)
def test_a_folder_that_cannot_be_written_is_neither_waited_for_nor_called_busy(use) -> None:
    body = f"""
try:
    with {use}:
        print("locked")
except PermissionError as error:
    print(error)
"""
    with open_folder() as folder:
        names = "locked_folder, locked_in_turn, locked_target"
        imports = f"from counterfoil.core.storage.locks import {names}"
        message = run_without_write_permission(imports, body, folder)
        assert str(folder) in message
        assert "cannot be written" in message or "/new" in message
        assert "ermission" in message


def test_a_read_only_file_system_is_not_called_busy(tmp_path, monkeypatch) -> None:
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="Read-only") as refused, locked_folder(tmp_path, "a"):
        pass
    assert refused.value.filename == str(tmp_path)


def test_a_folder_that_goes_again_and_again_is_an_error_and_not_a_busy_one(
    tmp_path, monkeypatch
) -> None:
    def vanish(*_: object) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(tmp_path))

    monkeypatch.setattr(os, "open", vanish)
    with pytest.raises(FileNotFoundError), locked_in_turn(tmp_path / LOCK, "x", None, lambda: True):
        pass


@pytest.mark.parametrize(
    "words",
    [
        ["backend.API_KEY=hush"],
        ["--Token", "hush"],
        ["--PASSWORD=hush"],
        ["-api-key", "hush"],
        ["url=http://user:hush@host:1"],
        ["http://user:hu/sh@host:1/path"],
        ["http://user:" + "hush" * 200 + "@host"],
        ["backend={'api_key': 'hush', 'url': 'x'}"],
        ["http://host/path?access_token=hush&x=1"],
        ["--header", "Authorization: Bearer hush"],
        ["secret." + "x" * 400 + "=hush"],
    ],
)
def test_a_secret_of_any_spelling_is_not_in_the_lock_file(words, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["counterfoil", "index", *words, "--out", "runs/a"])
    command = Holder.current().command
    assert "hush" not in command
    assert "hu/sh" not in command
    assert len(command) <= 301
    assert command.startswith("counterfoil index ")


def test_what_is_not_secret_stays_in_the_lock_file(monkeypatch) -> None:
    words = ["train", "a.yaml", "train.epochs=3", "http://host:80/x", "--out", "runs/a"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/counterfoil", *words])
    assert Holder.current().command == " ".join(["counterfoil", *words])


def test_the_command_is_found_quickly_however_long_its_words_are() -> None:
    script = "import sys\nfrom counterfoil.core.storage.locks import Holder\n"
    script += "sys.argv[1:] = ['x' * 500_000, '://' * 200_000, 'key' * 200_000]\nHolder.current()"
    subprocess.run([sys.executable, "-c", script], timeout=180, check=True)


def test_nobody_waits_while_a_holder_describes_itself(tmp_path, monkeypatch) -> None:
    """A slow description must not keep other threads from taking or freeing their locks."""
    real, free = Holder.current, []

    def current() -> Holder:
        def other() -> None:
            free.append(locks._guard.acquire(blocking=False))
            if free[-1]:
                locks._guard.release()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return real()

    monkeypatch.setattr(Holder, "current", current)
    with locked_folder(tmp_path, "waiting"):
        pass
    assert free == [True]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 9_999,
        '{"pid": true, "host": "h", "since": "s", "command": "c"}',
        '{"pid": 1, "host": {"a": 1}, "since": "s", "command": "c"}',
        '{"pid": 1, "host": "h", "since": ["s"], "command": "c"}',
        '{"pid": 1, "host": "h", "since": "s", "command": null}',
        '{"pid": 1.0, "host": "h", "since": "s", "command": "c"}',
        '{"pid": 1, "host": "h", "since": "s", "command": "' + "c" * 20_000 + '"}',
        "7",
    ],
)
def test_a_hostile_lock_file_names_nobody_and_ends_in_no_traceback(tmp_path, text) -> None:
    (tmp_path / LOCK).write_text(text)
    assert Holder.read(tmp_path / LOCK) is None
    with locked_folder(tmp_path, "waiting"):
        pass


def test_what_a_lock_file_says_is_shown_without_control_characters_and_not_at_any_length(
    tmp_path,
) -> None:
    tree = {"pid": 1, "host": "h\x1b[2J", "since": "s" * 4_000, "command": "c" * 4_000}
    (tmp_path / LOCK).write_text(json.dumps(tree))
    text = str(Holder.read(tmp_path / LOCK))
    assert "\x1b" not in text
    assert len(text) < 1000


def test_a_fifo_in_the_place_of_a_lock_file_blocks_nobody(tmp_path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from counterfoil.core.storage.locks import Holder, Lock, locked_folder\n"
        "path = Path(sys.argv[1]) / '.lock'\nassert Holder.read(path) is None\n"
        "try:\n    Lock(path).is_held()\nexcept OSError as error:\n    print(error.strerror)\n"
        "with locked_folder(path.parent, 'waiting'):\n    pass\n"
    )
    os.mkfifo(tmp_path / LOCK)
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "FIFO" in result.stdout


def test_another_thread_is_not_called_another_process(tmp_path) -> None:
    messages = []

    def other() -> None:
        with pytest.raises(BusyError) as refused, locked_folder(tmp_path, "training a run there"):
            pass
        messages.append(str(refused.value))

    with locked_folder(tmp_path, "training a run there"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    [message] = messages
    assert "another thread of this process is training a run there" in message
    assert "another process" not in message


def test_without_fcntl_no_lock_file_is_made(tmp_path) -> None:
    script = (
        "import argparse, shlex, tempfile, platform, sys\nfrom pathlib import Path\n"
        "sys.modules['fcntl'] = None\nsys.platform = 'win32'\n"
        "from counterfoil.core.storage.locks import Lock, locked_folder, locked_target\n"
        "from counterfoil.core.storage.atomic import Scratch\n"
        "folder = Path(sys.argv[1])\n"
        "with locked_folder(folder / 'a', 'x'), locked_folder(folder / 'a', 'x'):\n"
        "    assert not any((folder / 'a').iterdir())\n"
        "with locked_target(folder / 'b', 'x') as works:\n"
        "    assert works is False\n"
        "scratch = Scratch('s-', folder)\n"
        "print([str(path) for path in folder.rglob('*') if path != scratch.folder])\n"
        "scratch.close()\n"
        "assert not scratch.folder.exists()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"
