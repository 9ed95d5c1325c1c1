"""What a table shows besides training, measured by several processes at once.

Each keeps what it found where `collect` looks for it. What fails here fails there again, and is
told there.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from counterfoil.core.parallel import end_with_parent, usable_cores
from counterfoil.core.progress import Progress, Silent
from counterfoil.reproduce.columns import OWN, FoilOptions, MeasureColumn
from counterfoil.reproduce.measure import MeasureEvaluator, RunEvaluator
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.spec import Measured
from counterfoil.reproduce.table_rows import table_rows
from counterfoil.reproduce.workers import own_processes

POLL_SECONDS = 0.5
"""Seconds between looks at whether the user wants to stop."""

Measurement = tuple[MeasureColumn, PlannedRun, "PlannedRun | None"]


@dataclass(frozen=True)
class Task:
    """What one process does at a time: columns of runs, or the report of an ensemble."""

    columns: tuple[Measurement, ...] = ()
    ensemble: tuple[PlannedRun, ...] = ()
    standardize: bool = False


def tasks(plan: Plan, evaluator: MeasureEvaluator, columns: bool = True) -> list[Task]:
    """All that is not known yet; without ``columns``, only what recalls are taken from.

    Runs that are judged on one run's foils are one task, as these are written but once then.
    """
    found: dict[str, Task] = {}
    for asked, writers in _columns(plan) if columns else ():
        if not evaluator.known(*asked):
            key = writers or asked[1].digest
            task = found.get(key, Task())
            found[key] = replace(task, columns=(*task.columns, asked))
    for members, standardize in _ensembles(plan):
        kept = evaluator.evaluator.place(members, plan.folds, standardize)
        if not kept.is_file():
            found[kept.name] = Task(ensemble=members, standardize=standardize)
    return list(found.values())


def _columns(plan: Plan) -> Iterator[tuple[Measurement, str]]:
    """Columns of rows that are one finished run each, and who writes foils for them."""
    if not isinstance(plan.artifact, Measured):
        return
    for row in table_rows(plan):
        for index, members in enumerate(row.runs):
            if len(members) != 1 or members[0].state != "finished":
                continue
            for given in plan.artifact.measures:
                column = given.of_row(row.foils, row.blind)
                writer = plan.runs[column.writer][index] if column.writer else None
                if writer is None or writer.state == "finished":
                    by = members[0] if column.foils == OWN else writer
                    yield (column, members[0], writer), by.digest if by else ""


def _ensembles(plan: Plan) -> Iterator[tuple[tuple[PlannedRun, ...], bool]]:
    """Ensembles whose members are all there, and whether their scores are standardised."""
    if not isinstance(plan.artifact, Measured):
        return
    for row in table_rows(plan):
        for members in row.runs:
            if len(members) > 1 and all(run.state == "finished" for run in members):
                yield members, row.standardize


def measure_together(
    plan: Plan,
    evaluator: RunEvaluator,
    jobs: int,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
    columns: bool = True,
) -> int:
    """Measure what is missing, ``jobs`` at a time; how many tasks there were.

    What is under way where the user wants to stop is not waited for: results are written whole or
    not at all.
    """
    options = plan.artifact.foils if isinstance(plan.artifact, Measured) else FoilOptions()
    waiting = tasks(plan, MeasureEvaluator(evaluator, options), columns)
    if jobs < 2 or len(waiting) < 2:
        return 0
    at_once = min(jobs, len(waiting))
    threads = max(1, usable_cores() // at_once)
    pool = ProcessPoolExecutor(
        at_once,
        own_processes(),
        _begin,
        (evaluator.folder, evaluator.cache, options, plan.folds, threads),
    )
    others, futures = multiprocessing.active_children(), set[Future[None]]()
    try:
        futures |= {pool.submit(_measure, task) for task in waiting}
        for _ in progress.track(_ended(futures, should_stop), "measuring", len(waiting)):
            pass
    finally:
        if not all(future.done() for future in futures):
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
        pool.shutdown(cancel_futures=True)
    return len(waiting)


def _ended(futures: set[Future[None]], should_stop: Callable[[], bool]) -> Iterator[Future[None]]:
    open_ = futures
    while open_ and not should_stop():
        done, open_ = wait(open_, POLL_SECONDS, "FIRST_COMPLETED")
        yield from done


@dataclass
class _Process:
    """What a process of the pool has at hand."""

    evaluator: MeasureEvaluator
    folds: int | None


_here: list[_Process] = []


def _begin(
    folder: Path, cache: Path, options: FoilOptions, folds: int | None, threads: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's word counts
    end_with_parent()  # if it is killed, nobody wants the results
    torch.set_num_threads(threads)
    _here.append(_Process(MeasureEvaluator(RunEvaluator(folder, cache, Silent()), options), folds))


def _measure(task: Task) -> None:
    process = _here[0]
    for asked in task.columns:
        _tried(lambda asked=asked: process.evaluator.number(*asked))  # type: ignore[misc]
    if task.ensemble:
        evaluator = process.evaluator.evaluator
        _tried(lambda: evaluator.report(task.ensemble, process.folds, task.standardize))


def _tried(measure: Callable[[], object]) -> None:
    try:
        measure()
    except Exception:  # the table is put together by the parent, which meets it, too, and tells it
        return
