"""Several processes train as one does; if one of them dies, all end with its message."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from counterfoil.core import distributed
from counterfoil.core.distributed import processes
from counterfoil.core.errors import DataError, LostLoaderError
from counterfoil.objectives import objectives
from tests.faults.processes import CASES, compare, start_ranks, try_death, wait_all


def die() -> None:
    """Be killed, once the others are all waiting."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def work(fails: bool) -> None:
    """One process of a run: the second fails, or is killed while all others wait."""
    distributed.WATCH_SECONDS, distributed.FAILURE_GRACE_SECONDS = 0.2, 0.5
    with processes(dict(os.environ), lambda message: print(message, flush=True)):
        if os.environ["RANK"] == "1":
            if fails:
                raise DataError("the second image is missing")
            die()
        time.sleep(100)


@pytest.mark.parametrize("fails", [False, True])
def test_all_processes_end_with_the_message_of_one_that_fails_or_is_killed(
    tmp_path: Path, fails: bool
) -> None:
    started = time.monotonic()
    ranks = start_ranks(lambda: work(fails), tmp_path, 3, {})
    results, _ = wait_all(ranks, limit=60)
    assert time.monotonic() - started < 50
    for rank in (0, 2):
        assert results[rank].code == (DataError.exit_code if fails else 1)
        cause = "failed: the second image is missing" if fails else "ended without a message"
        assert "process 1 of this run" in results[rank].output
        assert cause in results[rank].output


def lose_loaders() -> None:
    """One process of a run: the second is killed; the first then loses its loaders, by torchrun."""
    distributed.WATCH_SECONDS = 0.2
    with processes(dict(os.environ)):
        try:
            dist.barrier() if os.environ["RANK"] == "0" else die()
        except RuntimeError as error:
            raise LostLoaderError("a loader process was lost") from error


def test_loaders_that_are_lost_with_another_process_are_not_the_message(tmp_path: Path) -> None:
    ranks = start_ranks(lose_loaders, tmp_path, 2, {})
    results, _ = wait_all(ranks, limit=60)
    last = results[0].output.strip().splitlines()[-1]
    assert "PeerError: process 1 of this run (pid" in last
    assert "lost" not in last


def test_every_objective_is_compared() -> None:
    assert {name for case in CASES.values() for name in case.objective} == set(objectives)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_several_processes_train_as_one_does(tmp_path, name, count) -> None:
    found = compare(tmp_path, name, count, double=True)
    assert found.steps >= 50
    assert found.loss < 1e-6
    assert found.weight < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_resumes_with_another_number_of_processes_after_one_died(tmp_path, seed) -> None:
    found = try_death(tmp_path, random.Random(seed))
    assert found["problems"] == []
    assert found["seconds"] < 30
