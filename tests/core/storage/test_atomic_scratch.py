"""Temporary folders: gone at the end, and after a kill when the next one is made."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from counterfoil.core.storage.atomic import Scratch, scratch_folder
from counterfoil.core.storage.locks import LOCK, Holder

pytest.importorskip("fcntl")

MAKE = (
    "import sys, time\nfrom pathlib import Path\n"
    "from counterfoil.core.storage.atomic import Scratch\n"
    "scratch = Scratch('serve-', Path(sys.argv[1]))\n"
    "(scratch.folder / 'large').write_text('x')\n"
    "print(scratch.folder, flush=True)\ntime.sleep(600)\n"
)


def making(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", MAKE, str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_swept_and_what_lives_is_not(tmp_path) -> None:
    (dead, left), (alive, used) = making(tmp_path), making(tmp_path)
    dead.kill()
    dead.wait()
    stranger = tmp_path / "serve-of-somebody"  # it has the name, but no lock says what it is
    stranger.mkdir()
    elsewhere = tmp_path / "serve-elsewhere"
    elsewhere.mkdir()
    other = replace(Holder.current(), host="another-machine", pid=2**22 + 1)
    (elsewhere / LOCK).write_text(json.dumps(asdict(other)))
    try:
        assert left.is_dir()
        with scratch_folder("serve-", tmp_path) as folder:
            assert not left.exists()
            assert {used, stranger, elsewhere, folder} == set(tmp_path.iterdir())
    finally:
        alive.kill()
        alive.wait()
        for process in (dead, alive):
            assert process.stdout is not None
            process.stdout.close()
    assert not folder.exists()


def test_a_folder_lives_as_long_as_somebody_can_close_it(tmp_path) -> None:
    close = Scratch("serve-", tmp_path).close
    (folder,) = tmp_path.iterdir()
    assert folder.is_dir()
    close()
    assert not folder.exists()
    close()
