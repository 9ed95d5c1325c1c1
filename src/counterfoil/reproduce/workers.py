"""Worker processes: one run or guide each, messages through a pipe, graceful shutdown."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeVar

import torch

from counterfoil.core.parallel import end_with_parent, usable_cores
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.registry import import_own, own_modules
from counterfoil.reproduce.plan import Job

T = TypeVar("T")
Notify = Callable[[], None]
Train = Callable[[Job, Path, Progress, Callable[[], bool], Notify, Notify], bool]
"""(job, cache, progress, should_stop, on_training, on_trained) -> whether the job is finished."""
Describe = Callable[[BaseException], str]
POLL_SECONDS = 0.5
"""Seconds between checks whether the user asked to stop."""

EXIT_SECONDS = 5.0
"""Seconds that workers have to exit after an error, and again after SIGTERM."""

SAVE_SECONDS = 60.0
"""Seconds that a run has to save and exit after its parent was killed."""

TERMINATED_CODE = 128 + signal.SIGTERM
"""Exit code of a worker ended by SIGTERM."""


@dataclass(frozen=True)
class Ended:
    """A run whose process has exited: finished, interrupted, or failed with ``error``."""

    run: Job
    finished: bool
    error: str | None = None


@cache
def own_processes() -> ForkServerContext | SpawnContext:
    """The start method of processes that may use CUDA, which a fork of this one could not.

    On Linux it is a fork server that has only imported what the processes need, which saves each of
    them the time of importing. If an import initializes CUDA, forks of the server cannot use a GPU;
    then the processes are spawned.
    """
    spawn = multiprocessing.get_context("spawn")
    if not sys.platform.startswith("linux"):
        return spawn
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["counterfoil.reproduce.collect"])
    return context if _may_use_cuda(context) else spawn


def _may_use_cuda(context: ForkServerContext) -> bool:
    """Whether processes of this context can use a GPU."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_bad_fork, args=(sender,))
    process.start()
    sender.close()
    try:
        return not receiver.recv()
    except EOFError:
        return False
    finally:
        process.join()


def _send_bad_fork(sender: Connection) -> None:
    sender.send(torch.cuda._is_in_bad_fork())


class Workers:
    """Processes that each do one job; if one crashes, only its job fails."""

    def __init__(self, cache: Path, jobs: int, train: Train, describe: Describe) -> None:
        self.cache, self.jobs, self.train, self.describe = cache, jobs, train, describe
        self.context = own_processes()
        self.stop: Event = self.context.Event()
        self.active: dict[Connection, tuple[Job, BaseProcess]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.active)

    @property
    def free(self) -> bool:
        return len(self.active) < self.jobs

    @property
    def running(self) -> set[str]:
        return {run.digest for run, _ in self.active.values()}

    def start(self, run: Job) -> None:
        receiver, sender = self.context.Pipe(duplex=False)
        threads = max(1, usable_cores() // self.jobs)
        settings = threads, own_modules
        work = (run, self.cache, self.train, self.describe, sender, self.stop, *settings)
        process = self.context.Process(target=_work, args=work, daemon=False)
        process.start()
        sender.close()  # the child has the only copy, so the pipe ends when the child exits
        self.active[receiver] = (run, process)

    def ask_to_stop(self) -> None:
        """Let every run save after its current step and exit."""
        self.stop.set()

    def poll(self, progress: Progress) -> list[Ended]:
        """Wait briefly, forward messages to ``progress``, and return the runs that ended."""
        ended: list[Ended] = []
        for receiver in wait(list(self.active), POLL_SECONDS):
            if not isinstance(receiver, Connection):
                continue
            run, process = self.active[receiver]
            try:
                kind, value = receiver.recv()
            except (EOFError, OSError):
                kind, value = "lost", None
            if kind == "say":
                progress.say(f"{run.title}: {value}")
                continue
            process.join()
            del self.active[receiver]
            errors = {"lost": _exit_message(process.exitcode), "failed": str(value)}
            ended.append(Ended(run, kind == "ended" and bool(value), errors.get(kind)))
        return ended

    def close(self) -> None:
        """Stop all workers.

        They exit after their current step. If an error or a signal is ending this process, their
        time for that is limited.
        """
        self.stop.set()
        if sys.exc_info()[0] is None:
            self._wait()
            return
        try:
            self._wait(EXIT_SECONDS)
            for _, process in self.active.values():
                process.terminate()
            self._wait(EXIT_SECONDS)
        finally:  # also after another signal
            for receiver, (_, process) in self.active.items():
                process.kill()
                process.join()
                receiver.close()
            self.active.clear()

    def _wait(self, seconds: float = float("inf")) -> None:
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            self.poll(Silent())  # keep reading: a worker with a full pipe would never exit


def _exit_message(code: int | None) -> str:
    if code in (TERMINATED_CODE, -signal.SIGTERM):
        return "its process was ended by SIGTERM; repeat the command to resume it"
    return f"its process exited with code {code} (out of memory?)"


class _Messages:
    """Progress of a worker; only lines of `say` reach the parent."""

    def __init__(self, sender: Connection) -> None:
        self.sender = sender

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        yield from items

    def note(self, text: str) -> None:
        return None

    def say(self, text: str) -> None:
        self.sender.send(("say", text))


class _Termination:
    """Handler of SIGTERM: training saves first; otherwise, or the second time, it exits at once."""

    requested = False
    training = False

    def on_training(self) -> None:
        self.training = True

    def on_trained(self) -> None:
        self.training = False
        if self.requested:  # after the last step
            raise SystemExit(TERMINATED_CODE)

    def receive(self, signum: int, frame: object) -> None:
        if self.requested or not self.training:
            raise SystemExit(TERMINATED_CODE)
        self.requested = True


def _restore_default() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _work(
    run: Job,
    cache: Path,
    train: Train,
    describe: Describe,
    sender: Connection,
    stop: Event,
    threads: int,
    modules: list[str],
) -> None:
    # Ctrl-C reaches every process of the terminal; only the parent reacts, and stops the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    termination = _Termination()
    signal.signal(signal.SIGTERM, termination.receive)
    if hasattr(os, "register_at_fork"):  # data loader workers have nothing to save
        os.register_at_fork(after_in_child=_restore_default)
    parent = multiprocessing.parent_process()

    def should_stop() -> bool:
        return (
            termination.requested or stop.is_set() or (parent is not None and not parent.is_alive())
        )

    end_with_parent(SAVE_SECONDS)
    torch.set_num_threads(threads)
    try:
        import_own(modules)
        notify = termination.on_training, termination.on_trained
        finished = train(run, cache, _Messages(sender), should_stop, *notify)
        if termination.requested and not finished and not stop.is_set():
            sender.send(("failed", _exit_message(TERMINATED_CODE)))
        else:
            sender.send(("ended", finished))
    except Exception as error:
        sender.send(("failed", describe(error)))
