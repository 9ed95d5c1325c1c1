"""Work shared by several processes: what a signal does to them while they are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from counterfoil.parallel import ordered_map

SCRIPT = """
import os, signal, sys
from concurrent.futures import process
from counterfoil.cli.signals import end_on_sigterm
from counterfoil.parallel import ordered_map

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
@pytest.mark.parametrize(("sent", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_while_workers_are_started_leaves_none_that_the_program_waits_for(
    sent, code
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, sent], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
