"""One process trains into a run folder at a time, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterfoil.core.errors import BusyError
from counterfoil.core.storage.locks import LOCK
from counterfoil.training.run_folder import locked_run
from tests.cli.test_cli import runner
from tests.cli.test_guide import SMALL, write_features
from tests.conftest import thinned
from tests.holding import content, held

LONG = [*SMALL, "train.epochs=100000", "train.save_every=1", "data.workers=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_features(tmp_path_factory.mktemp("run-folder") / "data")


@pytest.fixture
def training(data, tmp_path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training that goes on until it is ended, with a checkpoint and a forked loader."""
    folder = tmp_path / "run"
    process = launch(data, folder)
    while not (folder / "last").exists() and process.poll() is None:
        time.sleep(0.02)
    yield process, folder
    process.kill()
    process.communicate()


def launch(data: Path, folder: Path, **env: str) -> subprocess.Popen[str]:
    words = [*LONG, f"data.source={data}", "--out", folder, "--cache", folder.parent / "cache"]
    return subprocess.Popen(
        [sys.executable, "-m", "counterfoil", "train", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def train(*words: object):
    from counterfoil.cli import app

    return runner.invoke(app, ["train", *map(str, words)])


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_second_training_does_not_destroy_the_run_of_the_first(training, data) -> None:
    process, folder = training
    config, inode = (folder / "config.yaml").read_bytes(), folder.stat().st_ino
    other = [*SMALL, f"data.source={data}", "seed=7", "--out", folder]
    for words in ([*other, "--overwrite"], other, ["--resume", folder]):
        refused = train(*words, "--cache", folder.parent / "cache")
        assert refused.exit_code != 0
        assert f"process {process.pid} on " in str(refused.exception)
        assert "counterfoil train" in str(refused.exception)
    assert process.poll() is None
    assert (folder / "config.yaml").read_bytes() == config
    assert folder.stat().st_ino == inode
    # Its loader, a forked process that holds whatever is open, does not outlive it as a holder.
    workers = children(process.pid)
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        process.kill()
        process.wait()
        resumed = train("--resume", folder, "--cache", folder.parent / "cache", "seed=7")
        assert "another seed" in str(resumed.exception)  # it got past the lock, to the config
        again = train(*other, "--overwrite", "--cache", folder.parent / "cache")
        assert again.exit_code == 0, again.exception
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    assert b"seed: 7" in (folder / "config.yaml").read_bytes()
    assert not (folder / LOCK).exists()


@pytest.mark.slow
def test_a_training_that_is_terminated_saves_and_exits_with_143(training) -> None:
    process, folder = training
    workers = children(process.pid)
    assert workers
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143, told
    assert f"counterfoil train --resume {folder}" in " ".join(told.split())
    assert (folder / "last" / "training_state.pt").is_file()
    assert not any(map(is_alive, workers))
    assert not (folder / LOCK).exists()


@pytest.mark.slow
def test_if_the_first_of_several_processes_is_refused_all_end_with_its_error(
    data, tmp_path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "run"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    folder.mkdir()
    with held(folder / LOCK) as holder:
        ranks = [
            launch(data, folder, **env, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in (0, 1)
        ]
        told = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [8, 8], told
    for text in told:
        assert f"process {holder} on " in " ".join(text.split())
    assert content(folder) == {}


@pytest.mark.parametrize("umask", thinned([0o002, 0o077], 0o077))
def test_everything_in_a_run_folder_has_the_rights_that_the_umask_leaves(
    data, tmp_path, umask
) -> None:
    before = os.umask(umask)
    try:
        done = train(*SMALL, f"data.source={data}", "--out", tmp_path / "run", "--cache", tmp_path)
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.exception
    wrong = {
        str(path): oct(stat.S_IMODE(path.stat().st_mode))
        for path in (tmp_path / "run").rglob("*")
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert wrong == {}


def test_only_the_command_line_advises_an_option_of_the_command_line(data, tmp_path) -> None:
    folder = tmp_path / "run"
    with held(folder / LOCK):
        with pytest.raises(BusyError) as in_python, locked_run(folder):
            pass
        refused = train(*SMALL, f"data.source={data}", "--out", folder)
    assert "choose another folder" in str(in_python.value)
    assert "--out" not in str(in_python.value)
    assert str(refused.exception).endswith("choose another folder with --out")
