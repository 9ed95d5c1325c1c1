"""The slow stages of a demo in a process of their own, while the page is served."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import typer

from counterfoil.cli.demo_stages import AuditResult, Demo
from counterfoil.cli.signals import StopSignals, end_on_sigterm
from counterfoil.core.errors import CounterfoilError
from counterfoil.core.parallel import end_with_parent
from counterfoil.core.progress import Silent
from counterfoil.core.registry import import_own, own_modules
from counterfoil.evaluation.report import RetrievalReport

AUDIT, TRAINING = "the audit", "the training"
NICE = 10
"""Lowers the priority, so that the page stays responsive."""

GRACE_SECONDS = 30.0
"""Time to finish a training step and save it, before the process is killed."""


@dataclass(frozen=True)
class Failure:
    """Why a stage, or the whole process, failed."""

    stage: str
    reason: str


Message = AuditResult | RetrievalReport | Failure


class Background:
    """Audits and trains until `end`; ``on_message`` gets results and failures, on a thread."""

    def __init__(self, demo: Demo, on_message: Callable[[Message], None]) -> None:
        # spawn: the page's process has threads, with which a fork is not safe
        context = multiprocessing.get_context("spawn")
        self._receiver, self._sender = context.Pipe(duplex=False)
        settings = replace(demo, progress=Silent(), signals=StopSignals())
        arguments = settings, self._sender, own_modules
        self._process = context.Process(target=work, args=arguments, name="demo")
        self._on_message = on_message
        self._watcher = threading.Thread(target=self._watch, name="demo results", daemon=True)
        self._ending = self._complete = False

    def start(self) -> None:
        self._process.start()
        self._sender.close()  # the process has its own; else the watcher would never see an end
        self._watcher.start()

    def _watch(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = self._receiver.recv()
                failed = isinstance(message, Failure) and message.stage == TRAINING
                self._complete = failed or isinstance(message, RetrievalReport)
                self._on_message(message)
        self._process.join()
        if self._process.exitcode and not self._ending:
            code = self._process.exitcode
            self._on_message(Failure("the process", f"ended with exit code {code}"))

    def end(self) -> bool:
        """Let it save its state and end; whether it was ended before its last result."""
        self._ending = True
        if self._process.pid is None:  # never started
            return False
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._watcher.join()
        return not self._complete


def work(demo: Demo, results: Connection, modules: list[str]) -> None:
    """The process: each stage sends its result or, if it fails, one line; the next one follows."""
    with suppress(AttributeError, OSError):  # Windows has none of these
        os.setsid()  # Ctrl-C in the terminal is for the page, which then ends this process
        os.nice(NICE)
    end_with_parent()
    end_on_sigterm()
    import_own(modules)
    for name, stage in ((AUDIT, demo.audit), (TRAINING, demo.train)):
        try:
            message: Message = stage()
        except typer.Exit:  # told to stop, and saved
            return
        except CounterfoilError as error:
            message = Failure(name, str(error))
        except Exception as error:
            message = Failure(name, f"{type(error).__name__}: {error}")
        results.send(message)
