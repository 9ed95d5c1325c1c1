"""The slow stages of a demo in processes of their own, while the page is served."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
import typer

from counterfoil.cli.demo_stages import AuditResult, Demo
from counterfoil.cli.signals import StopSignals, end_on_sigterm
from counterfoil.core.errors import CounterfoilError
from counterfoil.core.parallel import end_with_parent, usable_cores
from counterfoil.core.progress import Silent
from counterfoil.evaluation.report import RetrievalReport

AUDIT, TRAINING = "the audit", "the training"
NICE = 10
"""Lowers the priority, so that the page stays responsive."""

GRACE_SECONDS = 30.0
"""Time to finish a training step and save it, before a process is killed."""


@dataclass(frozen=True)
class Failure:
    """Why a stage failed."""

    stage: str
    reason: str


Message = AuditResult | RetrievalReport | Failure

STAGES: dict[str, Callable[[Demo], Message]] = {AUDIT: Demo.audit, TRAINING: Demo.train}


class Background:
    """Audits and trains until `end`; ``on_message`` gets results and failures, one at a time.

    The stages run at the same time: each in a process of its own, with its share of the cores.
    """

    def __init__(self, demo: Demo, on_message: Callable[[Message], None]) -> None:
        settings = replace(demo, progress=Silent(), signals=StopSignals())
        lock = threading.Lock()

        def one_at_a_time(message: Message) -> None:
            with lock:
                on_message(message)

        self._stages = [_Stage(name, settings, one_at_a_time) for name in STAGES]

    def start(self) -> None:
        for stage in self._stages:
            stage.start()

    def end(self) -> bool:
        """Let the stages save their state and end; whether one was ended before its result."""
        for stage in self._stages:
            stage.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        unfinished = [stage.join(deadline) for stage in self._stages]
        return any(unfinished)


class _Stage:
    """The process of a stage, and a thread that waits for its message."""

    def __init__(self, name: str, demo: Demo, on_message: Callable[[Message], None]) -> None:
        # spawn: the page's process has threads, with which a fork is not safe
        context = multiprocessing.get_context("spawn")
        self._receiver, self._sender = context.Pipe(duplex=False)
        self._process = context.Process(target=work, args=(name, demo, self._sender), name=name)
        self._on_message = on_message
        self._watcher = threading.Thread(target=self._watch, name=f"{name} result", daemon=True)
        self._name = name
        self._ending = self._complete = False

    def start(self) -> None:
        self._process.start()
        self._sender.close()  # the process has its own; else the watcher would never see an end
        self._watcher.start()

    def _watch(self) -> None:
        with suppress(EOFError, OSError):
            message = self._receiver.recv()
            self._complete = True
            self._on_message(message)
        self._process.join()
        if self._process.exitcode and not self._ending:
            code = self._process.exitcode
            self._on_message(Failure(self._name, f"its process ended with exit code {code}"))

    def terminate(self) -> None:
        self._ending = True
        if self._process.pid is not None and self._process.is_alive():
            self._process.terminate()

    def join(self, deadline: float) -> bool:
        """Wait until ``deadline``, by `time.monotonic`, then kill; whether no message came."""
        if self._process.pid is None:  # never started
            return False
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._watcher.join()
        return not self._complete


def work(name: str, demo: Demo, results: Connection) -> None:
    """The process of a stage: sends its result or, if it fails, one line."""
    with suppress(AttributeError, OSError):  # Windows has none of these
        os.setsid()  # Ctrl-C in the terminal is for the page, which then ends this process
        os.nice(NICE)
    end_with_parent()
    end_on_sigterm()
    torch.set_num_threads(max(1, usable_cores() // len(STAGES)))
    try:
        message: Message = STAGES[name](demo)
    except typer.Exit:  # told to stop, and saved
        return
    except CounterfoilError as error:
        message = Failure(name, str(error))
    except Exception as error:
        message = Failure(name, f"{type(error).__name__}: {error}")
    results.send(message)
