"""Two processes joined by gloo that stay up for a whole session and run functions that are sent."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 90
"""Seconds that a function may take; one that waits for a process that has failed never ends."""


class NoAnswerError(AssertionError):
    """Both processes are still there, and none has answered."""


def serve(rank: int, meeting: str, connection: Connection, copied: Sequence[Connection]) -> None:
    """One of the two: join the other, then run what is sent until the sender is gone."""
    for end in copied:  # of the sender: else its end would not be seen here
        end.close()
    faulthandler.register(signal.SIGUSR1)  # where it waits, on standard error
    torch.set_num_threads(1)
    torch.manual_seed(0)  # whatever the tests before have drawn
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE),
    )
    while True:
        try:
            function, folder, arguments = connection.recv()
        except EOFError:
            return
        os.chdir(folder)
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class TwoProcesses:
    """Call it with a function of a module and its arguments: what both returned, by rank.

    They start in the caller's working directory. If the function fails in one of them, both are
    ended, as the other may be waiting for it; the next call starts anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        importlib.import_module("torch._dynamo")  # DistributedDataParallel does: once for both
        context = multiprocessing.get_context("fork")  # with torch and all tests imported
        self.started += 1
        for rank in range(2):
            mine, theirs = context.Pipe()
            meeting = str(self.folder / f"meeting-{self.started}")
            self.connections.append(mine)
            arguments = (rank, meeting, theirs, tuple(self.connections))
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)

    def stop(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.terminate()
            process.join()
        self.processes, self.connections = [], []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            return self._answers(function, *arguments)
        except NoAnswerError as error:
            # Seen once, cause unknown. What hangs by our code hangs again.
            warnings.warn(f"{function.__name__}: {error}; asked again", stacklevel=2)
            return self._answers(function, *arguments)

    def _answers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((function, os.getcwd(), arguments))
        answers: dict[int, Any] = {}
        while len(answers) < len(self.connections):
            waiting = [each for each in self.connections if self._rank(each) not in answers]
            ready = wait(waiting, PATIENCE)
            if not ready:
                self._show_where()
                self.stop()
                raise NoAnswerError(f"no answer for {PATIENCE} s")
            try:
                failure = None
                for connection in ready:
                    succeeded, value = connection.recv()
                    answers[self._rank(connection)] = value
                    failure = failure if succeeded else value
            except EOFError:
                failure = "a process has ended"
            if failure is not None:  # the other may wait for it forever
                self.stop()
                raise AssertionError(failure)
        return [answers[rank] for rank in sorted(answers)]

    def _show_where(self) -> None:
        for process in self.processes:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    def _rank(self, connection: Connection) -> int:
        return self.connections.index(connection)


@contextmanager
def two_processes(folder: Path) -> Iterator[TwoProcesses]:
    joined = TwoProcesses(folder)
    try:
        yield joined
    finally:
        joined.stop()
