"""Two processes joined by gloo that stay up for a whole session and run functions that are sent."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 90
"""Seconds that a function may take; one that waits for a process that has failed never ends."""


def serve(rank: int, meeting: str, address: str) -> None:
    """One of the two: join the other, then run what is sent until the sender is gone."""
    connection = Client(address)
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


class Forker:
    """A process that has computed nothing, and forks those that do.

    The threads of OpenMP do not survive a fork: a child of a process that has multiplied large
    matrices may wait for them forever. Make it before the first test runs.
    """

    def __init__(self) -> None:
        self.requests, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if not self.pid:
            self.requests.close()
            try:
                self._run(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def _run(self, requests: Connection) -> None:
        """Fork a process for each request, until the sender is gone."""
        while True:
            try:
                request = requests.recv()
            except EOFError:
                return
            if isinstance(request, int):
                os.kill(request, signal.SIGTERM)
                os.waitpid(request, 0)
                requests.send(None)
                continue
            pid = os.fork()
            if not pid:
                requests.close()
                serve(*request)
                return
            requests.send(pid)

    def start(self, rank: int, meeting: str) -> tuple[int, Connection]:
        """A new process that serves, and the connection to it."""
        with Listener(family="AF_UNIX") as listener:
            self.requests.send((rank, meeting, listener.address))
            return self.requests.recv(), listener.accept()

    def stop(self, pid: int) -> None:
        """End a process that was started."""
        self.requests.send(pid)
        self.requests.recv()

    def close(self) -> None:
        self.requests.close()
        os.waitpid(self.pid, 0)


class TwoProcesses:
    """Call it with a function of a module and its arguments: what both returned, by rank.

    They start in the caller's working directory. If the function fails in one of them, both are
    ended, as the other may be waiting for it; the next call starts anew.
    """

    def __init__(self, folder: Path, forker: Forker) -> None:
        self.folder, self.forker, self.started = folder, forker, 0
        self.processes: list[int] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        self.started += 1
        for rank in range(2):
            meeting = str(self.folder / f"meeting-{self.started}")
            process, connection = self.forker.start(rank, meeting)
            self.processes.append(process)
            self.connections.append(connection)

    def stop(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            self.forker.stop(process)
        self.processes, self.connections = [], []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
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
                raise AssertionError(f"no answer for {PATIENCE} s")
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
            os.kill(process, signal.SIGUSR1)
        time.sleep(1)

    def _rank(self, connection: Connection) -> int:
        return self.connections.index(connection)
