"""Worker processes: one run or guide each, news through a pipe, stopped politely."""

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
from counterfoil.reproduce.plan import Job

T = TypeVar("T")
Notify = Callable[[], None]
Train = Callable[[Job, Path, Progress, Callable[[], bool], Notify, Notify], bool]
"""Job, cache, progress, should_stop, on_training, on_trained; whether the job was finished."""
Describe = Callable[[BaseException], str]
POLL_SECONDS = 0.5
"""Seconds between looks at whether the user wants to stop."""

EXIT_SECONDS = 5.0
"""Seconds that workers have to end by themselves after an error, and again after SIGTERM."""

SAVE_SECONDS = 60.0
"""Seconds that a run has to save and end after its parent was killed."""

TERMINATED_CODE = 128 + signal.SIGTERM
"""Exit code of a worker that SIGTERM ended."""


@dataclass(frozen=True)
class Ended:
    """A run whose process is gone: finished, interrupted, or failed with ``error``."""

    run: Job
    finished: bool
    error: str | None = None


@cache
def own_processes() -> ForkServerContext | SpawnContext:
    """How processes begin that may use CUDA: not as copies of this one, nor with its threads.

    On Linux they are copies of a process that has imported what they need, and done nothing else:
    that saves each of them the seconds that importing takes. Should something that is imported
    ask for a GPU, no copy could use one: then all begin from nothing.
    """
    spawn = multiprocessing.get_context("spawn")
    if not sys.platform.startswith("linux"):
        return spawn
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["counterfoil.reproduce.collect"])
    return context if _may_use_cuda(context) else spawn


def _may_use_cuda(context: ForkServerContext) -> bool:
    """Whether processes that begin so can use a GPU."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(sender,))
    process.start()
    sender.close()
    try:
        spoilt: bool = receiver.recv()
    except EOFError:
        return False
    finally:
        process.join()
    return not spoilt


def _tell(sender: Connection) -> None:
    spoilt: bool = torch.cuda._is_in_bad_fork()
    sender.send(spoilt)


class Workers:
    """Processes that each carry out one run; a crash of one is that run's failure, no more."""

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
        work = (run, self.cache, self.train, self.describe, sender, self.stop, threads)
        process = self.context.Process(target=_work, args=work, daemon=False)
        process.start()
        sender.close()  # the child has its own copy: its death is then the end of the pipe
        self.active[receiver] = (run, process)

    def ask_to_stop(self) -> None:
        """Every run saves after its current step and ends."""
        self.stop.set()

    def news(self, progress: Progress) -> list[Ended]:
        """Wait a moment; pass on what the runs say, and return those that ended."""
        ended: list[Ended] = []
        ready = wait(list(self.active), POLL_SECONDS)
        for receiver in ready:
            if not isinstance(receiver, Connection):
                continue
            run, process = self.active[receiver]
            try:
                kind, value = receiver.recv()
            except (EOFError, OSError):
                process.join()
                del self.active[receiver]
                ended.append(Ended(run, False, _lost(process.exitcode)))
                continue
            if kind == "say":
                progress.say(f"{run.title}: {value}")
                continue
            process.join()
            del self.active[receiver]
            ended.append(
                Ended(run, False, str(value)) if kind == "failed" else Ended(run, bool(value))
            )
        return ended

    def close(self) -> None:
        """Nothing is left running, whatever happened.

        Workers end after their current step. While an error or a signal is ending this process,
        they have a limited time for that.
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
        finally:  # also after one more signal
            for receiver, (_, process) in self.active.items():
                process.kill()
                process.join()
                receiver.close()
            self.active.clear()

    def _wait(self, seconds: float = float("inf")) -> None:
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            self.news(Silent())  # read on: a worker whose pipe is full would never end


def _lost(code: int | None) -> str:
    if code in (TERMINATED_CODE, -signal.SIGTERM):
        return "its process was told to end (SIGTERM); it can be continued"
    return f"its process ended with code {code} (out of memory?)"


class _Messages:
    """Progress of a worker: only whole lines reach the parent."""

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
    """SIGTERM: training saves first; at other times, or the second time, it ends at once."""

    asked = False
    training = False

    def on_training(self) -> None:
        self.training = True

    def on_trained(self) -> None:
        self.training = False
        if self.asked:  # after the last step
            raise SystemExit(TERMINATED_CODE)

    def receive(self, signum: int, frame: object) -> None:
        if self.asked or not self.training:
            raise SystemExit(TERMINATED_CODE)
        self.asked = True


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
) -> None:
    # Ctrl-C reaches every process of the terminal: here the parent's word counts, once saved
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    termination = _Termination()
    signal.signal(signal.SIGTERM, termination.receive)
    if hasattr(os, "register_at_fork"):  # loaders have nothing to save
        os.register_at_fork(after_in_child=_restore_default)
    parent = multiprocessing.parent_process()

    def should_stop() -> bool:
        return termination.asked or stop.is_set() or (parent is not None and not parent.is_alive())

    end_with_parent(SAVE_SECONDS)
    torch.set_num_threads(threads)
    try:
        messages, listen = _Messages(sender), termination.on_training
        finished = train(run, cache, messages, should_stop, listen, termination.on_trained)
        if termination.asked and not finished and not stop.is_set():
            sender.send(("failed", _lost(TERMINATED_CODE)))
        else:
            sender.send(("ended", finished))
    except Exception as error:
        sender.send(("failed", describe(error)))
