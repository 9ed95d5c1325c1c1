"""Runs the missing jobs of a plan, one after another or in parallel processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from counterfoil.core.errors import CounterfoilError, DivergedError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.core.tensors.device import choose_device
from counterfoil.reproduce.plan import Job, Plan, PlannedGuide
from counterfoil.reproduce.results import note_sharing
from counterfoil.reproduce.workers import Workers
from counterfoil.training.guides.build import build_guide
from counterfoil.training.run import execute
from counterfoil.training.run_data import read_data, shared_train_split

T = TypeVar("T")

DIVERGED = "diverged: "
"""How `describe` begins an error of training that diverged."""

RETRIES = 2
"""How often a run that ran out of GPU memory in parallel is retried."""


def build_planned(
    guide: PlannedGuide, cache: Path, progress: Progress, should_stop: Callable[[], bool]
) -> bool:
    """Build a guide; False if the user stopped it between two blocks."""
    watched = _Watched(progress, should_stop)
    runs = [run.folder for run in guide.teachers]
    device = choose_device(guide.config.train.device)
    try:
        split = shared_train_split(runs, cache, progress)
        build_guide(guide.folder, runs, split, device=device, progress=watched)
    except _Stopped:
        return False
    return True


class _Stopped(Exception):
    """The user asked to stop. Finished blocks are on disk."""


class _Watched:
    """Progress that raises `_Stopped` between two blocks when the user asks to stop."""

    def __init__(self, progress: Progress, should_stop: Callable[[], bool]) -> None:
        self.progress, self.should_stop = progress, should_stop

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        for item in self.progress.track(items, description, total, done):
            if self.should_stop():
                raise _Stopped
            yield item

    def note(self, text: str) -> None:
        self.progress.note(text)

    def say(self, text: str) -> None:
        self.progress.say(text)


@dataclass
class Outcome:
    """Errors of the jobs by digest, numbers of finished jobs, and whether the user stopped."""

    errors: dict[str, str] = field(default_factory=dict)
    trained: int = 0
    built: int = 0
    interrupted: bool = False

    def count(self, job: Job, at_once: int = 1) -> None:
        """Count a finished job, of which ``at_once`` ran in parallel."""
        note_sharing(job.folder, at_once)
        if isinstance(job, PlannedGuide):
            self.built += 1
        else:
            self.trained += 1


def carry_out(
    plan: Plan,
    cache: Path,
    progress: Progress,
    outcome: Outcome | None = None,
    *,
    jobs: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    on_training: Callable[[], None] = lambda: None,
    on_trained: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train and build what is missing. The error of a failed job is stored; the others go on.

    ``should_stop`` is called after every step between ``on_training`` and ``on_trained``.
    ``on_trained`` is called when training has finished or failed, not when it was stopped. With
    several ``jobs``, ``on_training`` is called once, before the first one. Results are added to
    ``outcome``; jobs that failed there are not tried again.
    """
    outcome = outcome or Outcome()
    missing = [job for job in plan.missing() if job.digest not in outcome.errors]
    for job in missing:  # before hours of training
        error = job.find_error()
        if error is not None and _find_failed_need(job, outcome) is None:
            outcome.errors[job.digest] = error
            progress.say(f"failed: {job.title}: {error}")
    missing = [job for job in missing if job.digest not in outcome.errors]
    total = len(missing)
    if jobs > 1 and total > 1:
        _together(missing, cache, progress, jobs, should_stop, on_training, outcome)
        return outcome
    for number, job in enumerate(missing, 1):
        if should_stop():
            outcome.interrupted = True
            break
        if (failed := _find_failed_need(job, outcome)) is not None:
            outcome.errors[job.digest] = failed
            continue
        new = "building" if isinstance(job, PlannedGuide) else "run"
        action = "resuming" if job.state == "unfinished" else new
        progress.say(f"{action} {number}/{total}: {job.title}")
        try:
            finished = do_one(job, cache, progress, should_stop, on_training, on_trained)
        except Exception as error:  # a failed row must not stop the others
            outcome.errors[job.digest] = describe(error)
            progress.say(f"failed: {job.title}: {describe(error)}")
            on_trained()
            continue
        if not finished:
            outcome.interrupted = True
            break
        outcome.count(job)
    return outcome


def do_one(
    job: Job,
    cache: Path,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
    on_training: Callable[[], None] = lambda: None,
    on_trained: Callable[[], None] = lambda: None,
) -> bool:
    """Train a run or build a guide, resuming if possible; False if interrupted."""
    lock = job.folder.parent.parent / "locks" / job.digest
    with locked_in_turn(lock, f"making {job.title}", progress, should_stop) as acquired:
        if not acquired or job.state == "finished":
            return acquired
        if isinstance(job, PlannedGuide):
            return build_planned(job, cache, progress, should_stop)
        executed = execute(
            job.config,
            job.folder,
            cache,
            resume=job.state == "unfinished",
            progress=progress,
            should_stop=should_stop,
            on_training=on_training,
            on_trained=on_trained,
        )
        return not executed.result.interrupted


def describe(error: BaseException) -> str:
    """An error as one line; one from elsewhere begins with its type, divergence with `DIVERGED`."""
    if isinstance(error, DivergedError):
        return DIVERGED + " ".join(str(error).split())
    text = str(error) if isinstance(error, CounterfoilError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _find_failed_need(run: Job, outcome: Outcome) -> str | None:
    for needed in run.needs:
        if needed.digest in outcome.errors:
            return f"needs {needed.title}, which failed: {outcome.errors[needed.digest]}"
    return None


def _together(
    missing: list[Job],
    cache: Path,
    progress: Progress,
    jobs: int,
    should_stop: Callable[[], bool],
    on_training: Callable[[], None],
    outcome: Outcome,
) -> None:
    """Run up to ``jobs`` jobs in parallel, each in its own process."""
    waiting = _with_data(missing, cache, progress, outcome)
    tries, at_once = Counter[str](), dict[str, int]()
    on_training()
    workers = Workers(cache, jobs, do_one, describe)
    try:
        while waiting or workers.busy:
            stop = should_stop()
            if stop:
                workers.ask_to_stop()
                outcome.interrupted = True
            for run in [] if stop else list(waiting):
                if (failed := _find_failed_need(run, outcome)) is not None:
                    outcome.errors[run.digest] = failed
                    waiting.remove(run)
                elif workers.free and not _still_needed(run, waiting, workers):
                    waiting.remove(run)
                    progress.say(f"starting {run.title} ({len(waiting)} to go)")
                    workers.start(run)
                    at_once[run.digest] = workers.jobs
            for ended in workers.poll(progress):
                out_of_memory = _is_out_of_memory(ended.error)
                if out_of_memory and tries[ended.run.digest] < RETRIES and not stop:
                    tries[ended.run.digest] += 1
                    workers.jobs = max(1, workers.jobs - 1)
                    waiting.append(ended.run)
                    progress.say(
                        f"{ended.run.title}: out of GPU memory; will be retried with at most "
                        f"{workers.jobs} in parallel"
                    )
                elif ended.error is not None:
                    outcome.errors[ended.run.digest] = ended.error
                    progress.say(f"failed: {ended.run.title}: {ended.error}")
                elif ended.finished:
                    outcome.count(ended.run, at_once[ended.run.digest])
            if stop and not workers.busy:
                return
    finally:
        workers.close()


def _is_out_of_memory(error: str | None) -> bool:
    """Whether a run failed for lack of GPU memory, so that fewer jobs in parallel may help."""
    text = (error or "").lower()
    return "alloc_failed" in text or ("cuda" in text and "out of memory" in text)


def _still_needed(run: Job, waiting: list[Job], workers: Workers) -> bool:
    """Whether a job that this one needs is waiting or running."""
    open_ = {other.digest for other in waiting} | workers.running
    return any(needed.digest in open_ for needed in run.needs)


def _with_data(runs: list[Job], cache: Path, progress: Progress, outcome: Outcome) -> list[Job]:
    """Prepare data and features before the processes start, so that no two of them do it.

    Returns the jobs whose data could be read.
    """
    problems: dict[str, str | None] = {}
    usable = []
    for run in runs:
        key = run.config.data.model_dump_json()
        if key not in problems:
            try:
                read_data(run.config, cache, progress)
                problems[key] = None
            except Exception as error:  # jobs on other data go on
                problems[key] = describe(error)
        if (problem := problems[key]) is None:
            usable.append(run)
        else:
            outcome.errors[run.digest] = problem
    return usable
