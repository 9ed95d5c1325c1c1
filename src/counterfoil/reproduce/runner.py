"""Carries out what a plan lacks: one job after another, or several processes at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from counterfoil.core.errors import CounterfoilError
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

RETRIES = 2
"""How often a run is tried again that others left no memory of a GPU for."""


def build_planned(
    guide: PlannedGuide, cache: Path, progress: Progress, should_stop: Callable[[], bool]
) -> bool:
    """Build a guide to its end; False where the user stopped it between two blocks."""
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
    """The user wants to stop. What was built so far is on disk."""


class _Watched:
    """Progress of a build that ends between two blocks when it is asked to."""

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
    """What came of the jobs: errors by digest, how many were done, whether it was cut short."""

    errors: dict[str, str] = field(default_factory=dict)
    trained: int = 0
    built: int = 0
    interrupted: bool = False

    def count(self, job: Job, at_once: int = 1) -> None:
        """One more training, or one more guide, of so many at a time."""
        note_sharing(job.folder, at_once)
        if isinstance(job, PlannedGuide):
            self.built += 1
        else:
            self.trained += 1


def carry_out(
    plan: Plan,
    cache: Path,
    progress: Progress,
    *,
    jobs: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    on_training: Callable[[], None] = lambda: None,
    on_trained: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train and build what is missing. A job that fails is remembered; the others go on.

    ``should_stop`` is asked after every step between ``on_training`` and ``on_trained``. The latter
    is called after training that ended or failed, but not after training that was stopped. Several
    ``jobs`` are trained from the first ``on_training`` to the end of this call.
    """
    outcome = Outcome()
    missing = plan.missing()
    total = len(missing)
    if jobs > 1 and total > 1:
        _together(missing, cache, progress, jobs, should_stop, on_training, outcome)
        return outcome
    for number, job in enumerate(missing, 1):
        if should_stop():
            outcome.interrupted = True
            break
        if (failed := _failed_need(job, outcome)) is not None:
            outcome.errors[job.digest] = failed
            continue
        new = "building" if isinstance(job, PlannedGuide) else "run"
        how = "going on with" if job.state == "unfinished" else new
        progress.say(f"{how} {number}/{total}: {job.title}")
        try:
            finished = do_one(job, cache, progress, should_stop, on_training, on_trained)
        except Exception as error:  # whatever one row's failure is, the other rows are wanted
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
    """Train a run, or build a guide, from where it is to its end; False where interrupted."""
    lock = job.folder.parent.parent / "locks" / job.digest
    with locked_in_turn(lock, f"making {job.title}", progress, should_stop) as mine:
        if not mine or job.state == "finished":
            return mine
        if isinstance(job, PlannedGuide):
            return build_planned(job, cache, progress, should_stop)
        done = execute(
            job.config,
            job.folder,
            cache,
            resume=job.state == "unfinished",
            progress=progress,
            should_stop=should_stop,
            on_training=on_training,
            on_trained=on_trained,
        )
        return not done.result.interrupted


def describe(error: BaseException) -> str:
    """One line: our own messages as they are, others with their kind before them."""
    text = str(error) if isinstance(error, CounterfoilError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _failed_need(run: Job, outcome: Outcome) -> str | None:
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
    """Up to ``jobs`` of them at a time, each in a process of its own."""
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
                if (failed := _failed_need(run, outcome)) is not None:
                    outcome.errors[run.digest] = failed
                    waiting.remove(run)
                elif workers.free and not _still_needed(run, waiting, workers):
                    waiting.remove(run)
                    progress.say(f"starting {run.title} ({len(waiting)} to go)")
                    workers.start(run)
                    at_once[run.digest] = workers.jobs
            for ended in workers.news(progress):
                if _crowded(ended.error) and tries[ended.run.digest] < RETRIES and not stop:
                    tries[ended.run.digest] += 1
                    workers.jobs = max(1, workers.jobs - 1)
                    waiting.append(ended.run)
                    progress.say(
                        f"{ended.run.title}: out of memory beside others; tried again later, with "
                        f"{workers.jobs} at a time"
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


def _crowded(error: str | None) -> bool:
    """Whether a run ended for want of a GPU's memory, which there is more of with fewer runs."""
    told = (error or "").lower()
    return "alloc_failed" in told or ("cuda" in told and "out of memory" in told)


def _still_needed(run: Job, waiting: list[Job], workers: Workers) -> bool:
    """Whether something that this one needs has not ended yet."""
    open_ = {other.digest for other in waiting} | workers.running
    return any(needed.digest in open_ for needed in run.needs)


def _with_data(runs: list[Job], cache: Path, progress: Progress, outcome: Outcome) -> list[Job]:
    """Draw and extract before the processes start, so that no two of them do the same work."""
    ready: dict[str, str | None] = {}
    usable = []
    for run in runs:
        key = run.config.data.model_dump_json()
        if key not in ready:
            try:
                read_data(run.config, cache, progress)
                ready[key] = None
            except Exception as error:  # the rows on other data go on
                ready[key] = describe(error)
        problem = ready[key]
        if problem is None:
            usable.append(run)
        else:
            outcome.errors[run.digest] = problem
    return usable
