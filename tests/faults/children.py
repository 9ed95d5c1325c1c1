"""Commands in forked child processes, and faults that end them: SIGKILL at chosen moments.

The parent has imported torch and Counterfoil, so a try takes seconds instead of the time of an
import. A child is a process of its own: the kernel ends it as it would end a started program.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

CHANGES = {
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate", "os.chmod",
    "shutil.rmtree",
}  # fmt: skip
"""Audit events of operations that change the disk; files opened for writing are added to them."""

STAGES = {
    "data": "counterfoil.training.run:read_data",
    "step": "counterfoil.training.trainer:Trainer._step",
    "validation": "counterfoil.training.trainer:Trainer._validate",
    "save": "counterfoil.training.checkpoint:Checkpoints.save",
    "conclusion": "counterfoil.training.run:_conclude",
}
"""Parts of a training run that a kill can be aimed at."""

PRELOADED = {"counterfoil", "torch", "matplotlib", "numpy", "PIL", "rich", "sympy"}
"""Packages whose modules the parent imports for its children (`import_as`)."""

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Moment:
    """When a child is killed; a field that is None does not matter.

    ``seconds`` after its start, or after it enters ``stage`` for the ``occurrence``-th time.
    ``operation`` counts operations that change the disk, from 1, inside ``stage`` if one is named:
    the kill comes just before that one.
    """

    seconds: float | None = None
    stage: str | None = None
    occurrence: int = 1
    operation: int | None = None

    def __str__(self) -> str:
        where = f"{self.stage} {self.occurrence}, " if self.stage else ""
        if self.operation is not None:
            return f"{where}operation {self.operation}"
        return f"{where}{self.seconds:.2f} s" if self.seconds is not None else "never"


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (None if killed), its output, and the trace of its work."""

    pid: int
    code: int | None
    seconds: float
    output: str
    trace: list[str]

    @property
    def killed(self) -> bool:
        return self.code is None

    @property
    def where(self) -> str:
        """The innermost stage that had begun but not ended, else the part of the command."""
        stages: list[str] = []
        for line in self.trace:
            kind, _, name = line.partition(" ")
            if kind == "begin":
                stages.append(name)
            elif kind == "end" and stages:
                stages.pop()
        if stages:
            return stages[-1]
        seen = any(line.startswith("begin") for line in self.trace)
        return "between stages" if seen else "before the first stage"

    def operations(self, stage: str | None = None) -> int:
        """The largest number of operations on the disk, in one occurrence of a stage or in all."""
        if stage is None:
            return sum(line.startswith("disk") for line in self.trace)
        counts, inside = [0], False
        for line in self.trace:
            if line == f"begin {stage}":
                inside = True
                counts.append(0)
            elif line == f"end {stage}":
                inside = False
            elif inside and line.startswith("disk"):
                counts[-1] += 1
        return max(counts)

    def occurrences(self, stage: str) -> int:
        return sum(line == f"begin {stage}" for line in self.trace)


class _Tracer:
    """Runs in the child: records stages and disk operations, and kills it at its moment."""

    def __init__(self, descriptor: int, moment: Moment) -> None:
        self.descriptor, self.moment = descriptor, moment
        self.pid, self.entered, self.count = os.getpid(), 0, 0
        self.armed = moment.stage is None

    def write(self, line: str) -> None:
        if os.getpid() == self.pid:  # not in loader processes
            os.write(self.descriptor, f"{line}\n".encode())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: called before every operation on the disk."""
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & WRITES:
                return
        elif event not in CHANGES:
            return
        if os.getpid() != self.pid or threading.current_thread() is not threading.main_thread():
            return
        self.count += self.armed
        if self.armed and self.count == self.moment.operation:
            self.kill()
        self.write(f"disk {event} {os.path.basename(str(arguments[0]))}")

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.end(stage)

        return call

    def begin(self, stage: str) -> None:
        self.write(f"begin {stage}")
        if stage != self.moment.stage:
            return
        self.entered += 1
        self.armed = self.entered == self.moment.occurrence
        if self.armed and self.moment.seconds is not None:
            timer = threading.Timer(self.moment.seconds, self.kill)
            timer.daemon = True
            timer.start()

    def end(self, stage: str) -> None:
        if stage == self.moment.stage:
            self.armed = False
        self.write(f"end {stage}")


def stage_owner(place: str) -> tuple[Any, str]:
    """The object that has a function, and the function's name: ``module:Class.method``."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def import_all() -> None:
    """Import in the parent what every child needs."""
    importlib.import_module("counterfoil.cli")
    for place in STAGES.values():
        stage_owner(place)


def import_as(folder: Path) -> None:
    """Import in the parent what a child imported that ran to its end in this folder.

    Later children then start with it: to import PyTorch's compiler, which every optimizer does,
    and matplotlib takes several times as long as tiny training.
    """
    for name in (folder / "modules.txt").read_text().split():
        if name not in sys.modules and name.partition(".")[0] in PRELOADED:
            with suppress(Exception):  # some modules cannot be imported by their name alone
                importlib.import_module(name)


class Child:
    """A forked child that runs a command line or a function, and is killed at a moment, if given.

    ``prepare`` is called in the child first, such as to patch it. Output and trace go to files in
    ``folder``.
    """

    def __init__(
        self,
        work: Sequence[str] | Callable[[], None],
        folder: Path,
        moment: Moment | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.moment, self.output, self.trace = (
            moment or Moment(),
            folder / "output.txt",
            folder / "trace.txt",
        )
        self.output.unlink(missing_ok=True)
        self.trace.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(work, folder, self.moment, prepare)

    def wait(self, limit: float = 300.0) -> Ended:
        """Wait for its end; a child that takes longer than ``limit`` seconds counts as failed."""
        status, end = None, self.started + limit
        if self.moment.seconds is not None and self.moment.stage is None:
            status = self._wait_until(min(end, self.started + self.moment.seconds))
            if status is None:
                self.kill()
        status = self._wait_until(end) if status is None else status
        overdue = status is None
        if status is None:
            self.kill()
            _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self.started
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        if overdue:
            text += f"\nnot ended after {limit:.0f} s"
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not overdue
        code = None if killed else os.waitstatus_to_exitcode(status)
        return Ended(self.pid, code, seconds, text, self.lines())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def lines(self) -> list[str]:
        """The trace so far."""
        return self.trace.read_text().splitlines() if self.trace.exists() else []

    def _wait_until(self, end: float) -> int | None:
        """Its status, if it ends in time."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(0.005, left))


def run_child(
    work: Sequence[str] | Callable[[], None],
    folder: Path,
    moment: Moment | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> Ended:
    """A `Child` from its start to its end."""
    return Child(work, folder, moment, prepare).wait()


def _be_child(
    work: Sequence[str] | Callable[[], None],
    folder: Path,
    moment: Moment,
    prepare: Callable[[], None],
) -> None:
    """The whole life of the child, which never returns."""
    code = 1
    try:
        os.setsid()
        forget_exit_functions()
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        tracer = _Tracer(os.open(folder / "trace.txt", os.O_WRONLY | os.O_CREAT), moment)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        for stage, place in STAGES.items():
            owner, name = stage_owner(place)
            setattr(owner, name, tracer.wrap(stage, getattr(owner, name)))
        draw_no_charts()
        sys.addaudithook(tracer.watch)
        prepare()
        code = _execute(work)
        (folder / "modules.txt").write_text("\n".join(sys.modules))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 0:
            (folder / "modules.txt").write_text("\n".join(sys.modules))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _execute(work: Sequence[str] | Callable[[], None]) -> int:
    if callable(work):
        work()
        return 0
    from counterfoil.cli import main

    sys.argv = ["counterfoil", *work]
    main()
    return 0


def forget_exit_functions() -> None:
    """A child calls its own functions at its end, but not those of its parent."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def draw_no_charts() -> None:
    """All charts of a run take four times as long as its tiny training."""
    from counterfoil.training import report

    report.plots_of = lambda records, split: {}


def survivors(session: int, patience: float = 15.0) -> list[int]:
    """Processes of a child's session that are left ``patience`` seconds after its end."""
    end = time.monotonic() + patience
    while left := _of_session(session):
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return []


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


GENERATION = re.compile(r"(?<=-)[0-9]{8}(?=/)")
"""The number of a segment's commit: a repeated command may need one more."""


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files below a folder that match the patterns, by path, without hidden ones."""
    found = {path for name in names for path in folder.glob(name) if path.is_file()}
    paths = [path for path in found if not path.name.startswith(".")]
    return {
        GENERATION.sub("", path.relative_to(folder).as_posix()): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in sorted(paths)
    }


def remains(folder: Path) -> list[str]:
    """Hidden files and folders, which only an unfinished write leaves."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob(".*")
        if path.name.startswith(".")
    )
