"""Work shared by several processes: how many there are, what signals do, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from counterfoil.core import parallel
from counterfoil.core.parallel import bounded_workers, ordered_map, usable_cores
from counterfoil.core.progress import Silent
from tests.conftest import thinned

ROOT = Path(__file__).parents[2]
BOUND = 180.0
"""Seconds after which a process that should end is taken to hang."""

SCRIPT = """
import os, signal, sys
from concurrent.futures import process
from counterfoil.cli.signals import end_on_sigterm
from counterfoil.core.parallel import ordered_map

def same(task):
    return task

end_on_sigterm()
signal.signal(signal.SIGINT, signal.default_int_handler)
start = process.ProcessPoolExecutor._spawn_process

def interrupted(pool):
    start(pool)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

process.ProcessPoolExecutor._spawn_process = interrupted
list(ordered_map(same, range(10_000), workers=2))
"""


def test_results_come_in_the_order_of_the_tasks() -> None:
    assert list(ordered_map(abs, range(-20, 20), workers=2)) == [abs(n) for n in range(-20, 20)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are started by fork")
@pytest.mark.parametrize(
    ("sent", "code"), thinned([("SIGTERM", 143), ("SIGINT", -signal.SIGINT)], ("SIGTERM", 143))
)
def test_a_signal_while_workers_are_started_leaves_none_that_the_program_waits_for(
    sent, code
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, sent], capture_output=True, text=True, timeout=BOUND
    )
    assert done.returncode == code, done.stderr


POOL = """
import time
from counterfoil.core.parallel import ordered_map

def work(task):
    print("started", flush=True)
    time.sleep(1000)

list(ordered_map(work, range(8), workers=2))
"""

LOADER = """
import sys, time
from pathlib import Path
import torch
from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.run_data import TrainingBatches
from tests.conftest import make_split

train = make_split(Path(sys.argv[1]), "train", 24, 0)
config = build_config({"model": {"name": "vse-fc", "embed_size": 8},
                       "data": {"min_count": 1, "workers": 2}, "train": {"batch_size": 4}})
model = create_model(config.model, train, config.data)
batches = TrainingBatches(
    train, model, create_objective("hardest"), config, torch.device("cpu"), Silent()
)
for batch in batches.loader(0, 0):
    print("started", flush=True)
    time.sleep(1000)
"""

MEASURING = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from counterfoil.reproduce import measure_parallel
from counterfoil.reproduce.columns import FoilOptions
from counterfoil.reproduce.workers import own_processes
from tests.core.test_parallel import work_for_long

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = (folder, folder, FoilOptions(), None, 1, [])
    pool = ProcessPoolExecutor(2, own_processes(), measure_parallel._begin, given)
    list(pool.map(work_for_long, range(2)))
"""


def work_for_long(task: int) -> None:
    print("started", flush=True)
    time.sleep(1000)


def descendants(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in map(int, listed) for each in (child, *descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(POOL, id="pool"),
        pytest.param(LOADER, id="loader", marks=pytest.mark.slow),
        pytest.param(MEASURING, id="measuring", marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_a_parent_that_was_killed(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    started: list[int] = []
    with subprocess.Popen(
        [sys.executable, str(path), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as parent:
        assert parent.stdout is not None
        first = parent.stdout.readline()
        started = descendants(parent.pid)
        parent.kill()  # before anything is asserted: the end of the block waits for it
        parent.stdout.close()
    assert first.startswith("started")  # two processes may write at the same time
    assert len(started) >= 2
    end = time.monotonic() + BOUND
    while any(map(is_alive, started)) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in started if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


class Lines(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinities")
def test_only_cores_that_this_process_may_use_count() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from counterfoil.core.parallel import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("4:cpu,cpuacct:/a\n3:memory:/a\n", {"cpu/cpu.cfs_quota_us": "400000",
                                            "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100"}, 64),
        ("0::/\n", {"cpu.max": "nonsense"}, 64),
        ("nonsense\n", {}, 64),
    ],
)  # fmt: skip
def test_the_quota_of_a_container_bounds_the_cores(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(parallel, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(parallel, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert usable_cores() == expected


def test_more_workers_than_cores_are_not_started_and_a_line_says_so() -> None:
    cores, lines = usable_cores(), Lines()
    assert bounded_workers(0, "data.workers", lines) == 0
    assert bounded_workers(cores, "data.workers", lines) == cores
    assert lines.said == []
    assert bounded_workers(200, "data.workers", lines) == cores
    assert lines.said == [
        f"note: data.workers=200, but {cores} core(s) can be used: {cores} started"
    ]
