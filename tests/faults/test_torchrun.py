"""Under torchrun, a process that dies ends the others with its message, and the run resumes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core.test_parallel import is_alive
from tests.faults.children import survivors
from tests.faults.processes import (
    MESSAGE,
    difference_from_alone,
    start_ranks,
    train_alone,
    train_words,
    wait_all,
)

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

# The second process fails, or is killed, in its sixth step; the last save was after the fourth.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
from counterfoil.cli import main
from tests.faults.processes import _fail, fail_in

def die():
    Path({died!r}).write_text(str(time.time()))
    if {fails}:
        _fail()
    os.kill(os.getpid(), signal.SIGKILL)

Path({pids!r}, os.environ["RANK"]).write_text(f"{{os.getpid()}} {{os.getsid(0)}}")
if os.environ["RANK"] == "1":
    fail_in("step", 5, die)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "resumed"), [(True, 1), (False, 3)])
def test_torchrun_ends_with_the_message_of_a_process_that_dies_and_the_run_resumes(
    tmp_path: Path, fails: bool, resumed: int
) -> None:
    train_alone(tmp_path)
    script, died, pids = tmp_path / "train.py", tmp_path / "died", tmp_path / "pids"
    pids.mkdir()
    script.write_text(SCRIPT.format(root=str(ROOT), died=str(died), pids=str(pids), fails=fails))
    with (tmp_path / "output.txt").open("w") as output:
        torchrun = subprocess.Popen(
            [*TORCHRUN, str(script), *train_words(tmp_path, "run")],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            start_new_session=True,
        )
        try:
            code = torchrun.wait(300)
        finally:
            torchrun.kill()
    seconds = time.time() - float(died.read_text())
    text = " ".join((tmp_path / "output.txt").read_text().split())  # the console breaks lines
    assert code != 0
    assert seconds < 30
    ranks = {path.name: [*map(int, path.read_text().split())] for path in pids.iterdir()}
    assert sorted(ranks) == ["0", "1"]
    assert not [pid for pid, _ in ranks.values() if is_alive(pid)]
    # torchrun starts each rank in a session of its own; its loader processes are in there, too
    assert [survivors(session) for _, session in ranks.values()] == [[], []]
    assert survivors(torchrun.pid) == []
    assert f"process 1 of this run failed: {MESSAGE}" in text or not fails, text[-3000:]
    assert "process 1 of this run (pid" in text or fails, text[-3000:]
    again, _ = wait_all(
        start_ranks(train_words(tmp_path, "run", resume=True), tmp_path / "ranks", resumed, {})
    )
    assert [ended.code for ended in again] == [0] * resumed, again[0].output[-3000:]
    assert difference_from_alone(tmp_path) < 1e-4  # in single precision
