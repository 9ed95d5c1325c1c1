"""How processes of runs begin: as copies of one that has imported all, or from nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from counterfoil.core.progress import Silent
from counterfoil.reproduce import runner, workers
from tests.conftest import thinned
from tests.reproduce.conftest import TINY, planned, tiny


def look(sender: Connection) -> None:
    sender.send(("counterfoil.training.run" in sys.modules, os.getppid()))


def die(sender: Connection) -> None:
    os._exit(1)


def say_spoilt(sender: Connection) -> None:
    sender.send(True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="copies are made on Linux alone")
def test_a_process_begins_with_everything_imported_and_is_no_copy_of_this_one() -> None:
    context = workers.own_processes()
    assert context.get_start_method() == "forkserver"
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(sender,))
    process.start()
    imported, parent = receiver.recv()
    process.join()
    assert imported
    assert parent != os.getpid()


@pytest.mark.parametrize("odd", [die, say_spoilt])
def test_where_copies_cannot_use_a_gpu_processes_begin_from_nothing(monkeypatch, odd) -> None:
    monkeypatch.setattr(workers, "_send_bad_fork", odd)
    assert workers.own_processes.__wrapped__().get_start_method() == "spawn"


def needs_own_part(job, *_) -> bool:
    return job == sys.modules["my_part"].OWN


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_processes_import_the_modules_of_ones_own(tmp_path, monkeypatch, start) -> None:
    (tmp_path / "my_part.py").write_text("OWN = 'a job'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "own_modules", ["my_part"])
    monkeypatch.setattr(workers, "own_processes", lambda: multiprocessing.get_context(start))
    processes = workers.Workers(tmp_path, 1, needs_own_part, str)
    processes.start("a job")
    ended = []
    while not ended:
        ended = processes.poll(Silent())
    processes.close()
    assert [(one.finished, one.error) for one in ended] == [(True, None)]


def crowded(job, cache, progress, should_stop, *_) -> bool:
    """At first there is no room on the GPU; for the second run there never is."""
    tried = job.folder.with_suffix(".tried")
    first = not tried.exists()
    tried.parent.mkdir(parents=True, exist_ok=True)
    tried.touch()
    if first or job.name == "hard":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 26.00 MiB")
    return True


@pytest.mark.parametrize("jobs", thinned([2, 3], 2))
def test_a_run_that_others_left_no_memory_for_is_tried_again_with_fewer(
    jobs, monkeypatch, tmp_path, cache
) -> None:
    monkeypatch.setattr(runner, "do_one", crowded)
    lines: list[str] = []

    class Lines(Silent):
        def say(self, text: str) -> None:
            lines.append(text)

    plan = planned(tiny(), tmp_path)
    outcome = runner.carry_out(plan, cache, Lines(), jobs=jobs)
    assert outcome.trained == 1
    [failed] = outcome.errors
    assert failed == plan.runs["hard"][0].digest
    again = [line for line in lines if "will be retried" in line]
    assert len(again) == 1 + runner.RETRIES
    assert again[-1].endswith("with at most 1 in parallel")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_misspelt_option_is_told_before_any_run_is_trained(jobs, tmp_path, cache) -> None:
    lines: list[str] = []

    class Lines(Silent):
        def say(self, text: str) -> None:
            lines.append(text)

    runs = {**TINY["runs"], "hard": {"common": {"objective": {"hardest": {"margn": 0.2}}}}}
    plan = planned(tiny(runs=runs), tmp_path)
    outcome = runner.carry_out(plan, cache, Lines(), jobs=jobs)
    message = "objective.hardest.margn: objective 'hardest' has no option 'margn'"
    assert message in lines[0]
    assert lines[0].startswith("failed: hard, seed 0: ")
    assert [message in error for error in outcome.errors.values()] == [True]
    assert outcome.trained == 1


@pytest.mark.parametrize(
    ("error", "crowded"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB", True),
        ("AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling …", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("its process exited with code -9 (out of memory?)", False),
        ("ValueError: no", False),
        (None, False),
    ],
)
def test_what_is_want_of_a_gpus_memory(error, crowded) -> None:
    assert runner._is_out_of_memory(error) == crowded


def until_told(job, cache, progress, should_stop, on_training, on_trained) -> bool:
    """A run that goes on until it has to stop, and then saves."""
    on_training()
    progress.say(str(os.getpid()))
    while not should_stop():
        time.sleep(0.02)
    (cache / "saved").touch()
    return False


ORPHAN = """
import sys, time
from pathlib import Path
from counterfoil.core.progress import Silent
from counterfoil.reproduce.workers import Workers
from tests.reproduce.conftest import planned, tiny
from tests.reproduce.test_workers import until_told

class Lines(Silent):
    def say(self, text):
        print("started", flush=True)

if __name__ == "__main__":
    some = Workers(Path(sys.argv[1]), 1, until_told, str)
    some.start(planned(tiny(), Path(sys.argv[1])).runs["all"][0])
    while True:
        some.poll(Lines())
"""


@pytest.mark.slow
def test_a_worker_whose_parent_was_killed_saves_and_ends(tmp_path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    assert "started" in parent.stdout.readline()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert appears(tmp_path / "saved")


def test_a_worker_that_is_terminated_saves_and_says_so(tmp_path) -> None:
    class Lines(Silent):
        def say(self, text: str) -> None:
            os.kill(int(text.split()[-1]), signal.SIGTERM)

    some = workers.Workers(tmp_path, 1, until_told, str)
    some.start(planned(tiny(), tmp_path).runs["all"][0])
    ended: list[workers.Ended] = []
    while not ended:
        ended = some.poll(Lines())
    assert ended[0].error is not None
    assert "SIGTERM" in ended[0].error
    assert (tmp_path / "saved").exists()


def never_asks(job, cache, progress, *hooks) -> bool:
    """Like extracting features, or the evaluation at the end: nobody asks whether to stop."""
    progress.say(str(os.getpid()))
    time.sleep(12)
    (cache / "slept").touch()
    return True


def trains_one_long_step(job, cache, progress, should_stop, *hooks) -> bool:
    if hooks:
        hooks[0]()
    return never_asks(job, cache, progress)


def told_after_its_last_step(job, cache, progress, should_stop, *hooks) -> bool:
    for notify in hooks:
        notify()
        os.kill(os.getpid(), signal.SIGTERM)
    return never_asks(job, cache, progress)


class Terminates(Silent):
    """Sends SIGTERM to the worker that says its id."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def say(self, text: str) -> None:
        for _ in range(self.times):
            os.kill(int(text.split()[-1]), signal.SIGTERM)
            time.sleep(0.3)  # two at once are one


@pytest.mark.parametrize(
    ("work", "times"),
    [(never_asks, 1), (trains_one_long_step, 2), (told_after_its_last_step, 0)],
)
def test_a_worker_ends_at_sigterm_outside_training_and_at_a_second_one(
    work, times, tmp_path
) -> None:
    some = workers.Workers(tmp_path, 1, work, str)
    some.start(planned(tiny(), tmp_path).runs["all"][0])
    ended: list[workers.Ended] = []
    while not ended:
        ended = some.poll(Terminates(times))
    assert not (tmp_path / "slept").exists()
    assert ended[0].error is not None
    assert "SIGTERM" in ended[0].error


@pytest.mark.parametrize("work", [never_asks, trains_one_long_step])
def test_a_parent_that_is_ending_waits_for_its_workers_only_so_long(
    work, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(workers, "EXIT_SECONDS", 0.5, raising=False)
    some = workers.Workers(tmp_path, 1, work, str)
    some.start(planned(tiny(), tmp_path).runs["all"][0])
    [(_, process)] = some.active.values()

    def end() -> None:
        try:
            said = Said()
            while not said.lines:
                some.poll(said)
            raise SystemExit(143)
        finally:
            some.close()

    with pytest.raises(SystemExit):
        end()
    assert not some.busy
    assert not process.is_alive()
    assert not (tmp_path / "slept").exists()


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def appears(path: Path) -> bool:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return path.exists()
