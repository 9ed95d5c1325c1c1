"""Measures the columns and ensembles of a table in parallel processes.

Results go to the cache, from which `collect` reads them. What fails here fails again in `collect`,
which reports the error.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from counterfoil.core.parallel import end_with_parent, usable_cores
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.registry import import_own, own_modules
from counterfoil.reproduce.columns import OWN, FoilOptions, MeasureColumn
from counterfoil.reproduce.measure import MeasureEvaluator, RunEvaluator
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import table_rows
from counterfoil.reproduce.spec import Measured
from counterfoil.reproduce.workers import own_processes

POLL_SECONDS = 0.5
"""Seconds between checks whether the user asked to stop."""

Measurement = tuple[MeasureColumn, PlannedRun, "PlannedRun | None"]


@dataclass(frozen=True)
class Task:
    """One unit of work of a process: columns of runs, or the report of an ensemble."""

    columns: tuple[Measurement, ...] = ()
    ensemble: tuple[PlannedRun, ...] = ()
    standardize: bool = False


def tasks(plan: Plan, evaluator: MeasureEvaluator, columns: bool = True) -> list[Task]:
    """Tasks for everything that is not cached; without ``columns``, only ensembles.

    Columns on the foils of one run are one task, so that the foils are written once.
    """
    by_key: dict[str, Task] = {}
    for measurement, writer in _columns(plan) if columns else ():
        if not evaluator.known(*measurement):
            key = writer or measurement[1].digest
            task = by_key.get(key, Task())
            by_key[key] = replace(task, columns=(*task.columns, measurement))
    for members, standardize in _ensembles(plan):
        path = evaluator.evaluator.report_path(members, plan.folds, standardize)
        if not path.is_file():
            by_key[path.name] = Task(ensemble=members, standardize=standardize)
    return list(by_key.values())


def _columns(plan: Plan) -> Iterator[tuple[Measurement, str]]:
    """Columns of rows with one finished run per seed, and the digest of the foils' writer."""
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
    """Ensembles whose members are all finished, and whether their scores are standardized."""
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
    """Measure what is missing with ``jobs`` processes; returns the number of tasks.

    When the user asks to stop, running tasks are terminated; results are written atomically.
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
        (evaluator.folder, evaluator.cache, options, plan.folds, threads, own_modules),
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
    """State of a process of the pool."""

    evaluator: MeasureEvaluator
    folds: int | None


_here: list[_Process] = []


def _begin(
    folder: Path,
    cache: Path,
    options: FoilOptions,
    folds: int | None,
    threads: int,
    modules: list[str],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    torch.set_num_threads(threads)
    import_own(modules)
    _here.append(_Process(MeasureEvaluator(RunEvaluator(folder, cache, Silent()), options), folds))


def _measure(task: Task) -> None:
    process = _here[0]
    for measurement in task.columns:
        with suppress(Exception):  # the parent meets the same error in `collect`, and reports it
            process.evaluator.number(*measurement)
    if task.ensemble:
        with suppress(Exception):
            process.evaluator.evaluator.report(task.ensemble, process.folds, task.standardize)
