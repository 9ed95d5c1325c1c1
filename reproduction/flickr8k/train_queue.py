"""Train the runs of several tables in one queue, by processes that last.

    python reproduction/flickr8k/train_queue.py QUEUE.yaml --jobs 10 --seconds 540

QUEUE.yaml is a list of what `counterfoil reproduce` takes, in the order of priority:

    - name: flickr8k.tuning
      data: lite2-36
      seeds: 1
      rows: [VSE*]
      values: [0.001, 0.002]
      climb: true
      overrides: [train.precision=bf16]
      store: results
    - name: flickr8k.naaf
      data: lite2-36
      tuned: [results/flickr8k.tuning@lite2-36.json]
      store: results

``values`` selects points of a sweep. With ``climb``, a line whose best value is at an edge of what
was tried gets the next one, until it is inside: give it two values to start from, or none if the
store has some, and values far from the best are not trained. A run whose result is in ``store`` is
not trained, except with ``retrain``: for rows that start from one checkpoint which is gone, so that
all start from the same new one. Every process imports PyTorch, starts the GPU and reads the data
once, and then trains one run after the other, so that short runs do not wait for these. After
``--seconds``, runs save themselves, and what else the tables show of finished runs is measured; the
same call goes on. Recalls are stored meanwhile, all numbers at the end. Ensembles are left to
`counterfoil reproduce`, which finds the runs.

Only what no table uses is left out of a run: its page, example searches, the yardstick of its
explanations, and the comparison with the run that it started from (a table that shows it needs a
queue of its own: a finished run is not compared later). What a finished run needs only to be
resumed is deleted.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from counterfoil.cli.reproduce import _plan, _Request
from counterfoil.core.errors import CounterfoilError
from counterfoil.core.progress import Silent
from counterfoil.reproduce.artifact import Sweep
from counterfoil.reproduce.collect import collect
from counterfoil.reproduce.columns import FoilOptions, MeasureColumn
from counterfoil.reproduce.grid import latest, next_value, of_line, with_tried, with_value
from counterfoil.reproduce.measure import MeasureEvaluator, RunEvaluator
from counterfoil.reproduce.plan import Job, Plan, PlannedRun, make_plan
from counterfoil.reproduce.results import Reproduction, note_sharing, table_rows
from counterfoil.reproduce.runner import Outcome
from counterfoil.reproduce.spec import Measured
from counterfoil.reproduce.store import ResultCache, read_stored, stored_name

END_SECONDS = 10.0
"""Time for all processes to end, which takes long if many of them share a GPU."""
STORE_SECONDS = 20.0
"""Results are stored this often, so that a machine that goes away takes few of them along."""


class Entry(BaseModel):
    """An entry of the queue; a misspelt key would silently train the runs of whole tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    store: Path
    data: str = "scenes"
    published: str | None = None
    scale: Literal["full", "smoke"] = "full"
    seeds: int = Field(3, ge=1)
    rows: list[str] = []
    overrides: list[str] = []
    tuned: list[Path] = []
    values: list[Any] | None = None
    climb: bool = False
    retrain: bool = False


def read_entries(path: Path) -> list[Entry]:
    """The entries of a queue; ends the program with what is wrong with them."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TypeAdapter(list[Entry]).validate_python(tree)
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"{path}: {error}") from None
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, one['loc'])) or '(top)'}: {one['msg']}" for one in error.errors()
        ]
        raise SystemExit(f"{path}: " + "\n  ".join(lines)) from None


class Wanted(NamedTuple):
    """A column of a table for a run, and the run that writes its foils, if any does."""

    options: FoilOptions
    column: MeasureColumn
    run: PlannedRun
    writer: PlannedRun | None


@dataclass(frozen=True)
class Measurement:
    """Columns that one process measures; those with foils of one writer go together."""

    title: str
    columns: tuple[Wanted, ...]


class Queue:
    """The missing jobs of all entries by digest, and for each the first entry that wants it."""

    def __init__(self, path: Path, out: Path) -> None:
        self.jobs: dict[str, Job] = {}
        self.measured: set[str] = set()
        self.ranks: dict[str, int] = {}
        self.plans: list[tuple[Plan, ResultCache]] = []
        self.climbing: set[int] = set()
        for rank, entry in enumerate(read_entries(path)):
            self._read(rank, entry, out)

    def _read(self, rank: int, entry: Entry, out: Path) -> None:
        request = _Request(
            entry.data,
            entry.published,
            entry.scale,
            entry.seeds,
            tuple(entry.overrides),
            tuple(entry.tuned),
        )
        try:
            plan, order = _plan(entry.name, request, entry.rows, out)
        except CounterfoilError as error:
            raise SystemExit(f"{entry.name}: {error}") from None
        known = read_stored(entry.store / stored_name(plan))
        if isinstance(plan.artifact, Sweep):
            plan = make_plan(with_tried(plan.artifact, known), plan.settings, plan.out)
        elif entry.climb or entry.values is not None:
            raise SystemExit(f"{entry.name}: values and climb are for sweeps, and this is none")
        stored = ResultCache(entry.store, plan, order)
        if not entry.retrain:
            stored.skip_known()
        self.plans.append((plan, stored))
        selected = None
        if entry.values is not None and isinstance(plan.artifact, Sweep):
            points = plan.artifact.points
            selected = {point.title for point in points if point.value in entry.values}
            unknown = set(entry.values) - {point.value for point in points}
            if unknown:
                raise SystemExit(f"{entry.name}: no such value of the sweep: {sorted(unknown)}")
        self._want(rank, plan, selected)
        if entry.climb:
            self.climbing.add(rank)
            if known is not None:
                self._climb(rank, plan, known)

    def _want(self, rank: int, plan: Plan, titles: set[str] | None) -> None:
        """Queue the missing runs of a plan, or only those with one of these titles."""
        runs = plan.runs
        if titles is not None:
            plan.runs = {title: of for title, of in runs.items() if title in titles}
        for job in plan.missing():
            self.jobs.setdefault(job.digest, job)
            self.ranks.setdefault(job.digest, rank)
        plan.runs = runs

    def _climb(self, rank: int, plan: Plan, result: Reproduction) -> None:
        """Queue the next value of every line whose best one is at an edge."""
        for line in plan.artifact.lines if isinstance(plan.artifact, Sweep) else ():
            value = next_value(plan.artifact, line, of_line(result, line))
            if value is None:
                continue
            if value not in plan.artifact.values_of(line):
                plan.artifact = with_value(plan.artifact, line.run, value)
                plan.runs = make_plan(plan.artifact, plan.settings, plan.out).runs
            points = plan.artifact.points
            self._want(
                rank, plan, {p.title for p in points if (p.line.run, p.value) == (line.run, value)}
            )

    @property
    def shows_forgetting(self) -> bool:
        """Whether a table compares runs with those that they started from."""
        return any(
            column.is_forgetting
            for plan, _ in self.plans
            if isinstance(plan.artifact, Measured)
            for column in plan.artifact.measures
        )

    def measurements(self) -> list[Measurement]:
        """What can be measured now and was not returned before, by the writer or the run."""
        ready: dict[str, list[Wanted]] = {}
        for plan, _ in self.plans:
            for wanted in _wanted_columns(plan):
                runs = [one for one in (wanted.run, wanted.writer) if one is not None]
                key = " ".join(
                    [
                        *(one.digest for one in runs),
                        wanted.column.model_dump_json(),
                        wanted.options.model_dump_json(),
                    ]
                )
                if key in self.measured or any(one.state != "finished" for one in runs):
                    continue
                self.measured.add(key)
                ready.setdefault(runs[-1].title, []).append(wanted)
        return [Measurement(f"measuring by {by}", tuple(own)) for by, own in ready.items()]

    def store(
        self, cache_folder: Path, errors: dict[str, str], *, with_measures: bool = False
    ) -> None:
        """Store the results of the runs that are finished; lines that climb may want more runs.

        Without measures: their recalls. With them, those that no process has measured take long.
        """
        for rank, (plan, stored) in enumerate(self.plans):
            evaluator = RunEvaluator(plan.out / "evaluations", cache_folder, Silent())
            now = collect(plan, Outcome(errors), evaluator, with_measures=with_measures)
            total = stored.add(now)
            if rank in self.climbing:
                self._climb(rank, plan, latest(total, now))


def _wanted_columns(plan: Plan) -> Iterator[Wanted]:
    """The measured columns of all rows and seeds whose numbers are not stored."""
    if not isinstance(plan.artifact, Measured):
        return
    for row in table_rows(plan):
        for index, members in enumerate(row.runs):
            if len(members) != 1 or members[0].digest in plan.settled:
                continue
            for given in plan.artifact.measures:
                column = given.of_row(row.foils, row.blind)
                writer = plan.runs[column.writer][index] if column.writer else None
                yield Wanted(plan.artifact.foils, column, members[0], writer)


def _begin(cache_folder: Path, forgetting: bool) -> None:
    """Leave out of this process's runs what no table uses, and read each data set once."""
    from counterfoil.reproduce import measure
    from counterfoil.training import run

    read = run.read_data

    @cache
    def once(key: str) -> list[Any]:
        return []

    def read_once(
        config: Any, folder: Path, progress: Any, features: Any = None, aside: Any = None
    ) -> Any:
        key = json.dumps(
            [config.data.model_dump(), config.evaluation.split, sorted(aside or []), config.seed]
        )
        kept = once(key if config.data.noise else key.rpartition(",")[0])
        if not kept:
            kept.append(read(config, folder, progress, features, aside))
        return kept[0]

    run.read_data = measure.read_data = read_once
    run.save_yardstick = lambda *_, **__: None
    run.write_report = lambda folder, *_, **__: folder / "report.html"
    run.example_searches = lambda *_, **__: None
    if not forgetting:
        run.forgetting_section = lambda *_, **__: []


def serve(pipe: Connection, out: Path, cache_folder: Path, forgetting: bool, stop: Any) -> None:
    """Train or measure one job after the other, as they come through the pipe."""
    import torch

    from counterfoil.reproduce.runner import describe, do_one

    torch.set_num_threads(1)
    _begin(cache_folder, forgetting)
    evaluator = RunEvaluator(out / "evaluations", cache_folder, Silent())
    measures: dict[str, MeasureEvaluator] = {}
    while True:
        job = pipe.recv()
        if job is None:
            return
        started = time.monotonic()
        finished, error = False, None
        try:
            if isinstance(job, Measurement):
                for wanted in job.columns:
                    key = wanted.options.model_dump_json()
                    if key not in measures:
                        measures[key] = MeasureEvaluator(evaluator, wanted.options)
                    try:
                        measures[key].number(wanted.column, wanted.run, wanted.writer)
                    except Exception as problem:  # the others go on
                        error = f"{wanted.column.title}, {wanted.run.title}: {problem}"
                finished = True
            else:
                finished = do_one(job, cache_folder, Silent(), should_stop=stop.is_set)
                if finished and (job.folder / "best").is_dir():
                    shutil.rmtree(job.folder / "last", ignore_errors=True)
        except Exception as problem:  # one failed run must not stop the others
            error = describe(problem)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        pipe.send((finished, error, time.monotonic() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("queue", type=Path)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("runs") / "reproduce")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--log", type=Path, help="one line of JSON for every run that ended")
    options = parser.parse_args()
    begin = time.monotonic()
    queue = Queue(options.queue, options.out)
    waiting = sorted(queue.jobs.values(), key=lambda job: queue.ranks[job.digest])
    print(f"{len(waiting)} jobs missing, planned in {time.monotonic() - begin:.0f} s", flush=True)
    context = mp.get_context("spawn")
    stop = context.Event()
    workers: dict[Connection, mp.process.BaseProcess] = {}
    arguments = options.out, options.cache, queue.shows_forgetting, stop
    measuring = deque(queue.measurements())
    for _ in range(min(options.jobs, len(waiting) + len(measuring))):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, *arguments))
        process.start()
        theirs.close()
        workers[ours] = process
    saved = begin
    free, done = list(workers), 0
    busy: dict[Connection, Job | Measurement] = {}
    failed: dict[str, str] = {}
    unmeasured: list[str] = []
    known = set(queue.jobs)
    while (waiting or measuring or busy) and (free or busy):  # without processes, nothing goes on
        if time.monotonic() - begin > options.seconds and not stop.is_set():
            stop.set()
            print(f"time is up: {len(waiting)} jobs not begun, {len(busy)} stopped", flush=True)
        if stop.is_set():
            waiting.clear()
        while free and measuring:
            pipe = free.pop()
            busy[pipe] = measuring.popleft()
            pipe.send(busy[pipe])
        for job in list(waiting):
            needs = [need.digest for need in job.needs]
            if any(need in failed for need in needs):
                failed[job.digest] = "needs a job that failed"
                waiting.remove(job)
            elif free and job.digest not in failed:
                training = [one for one in busy.values() if not isinstance(one, Measurement)]
                open_ = {other.digest for other in (*waiting, *training)}
                if not any(need in open_ for need in needs):
                    waiting.remove(job)
                    pipe = free.pop()
                    busy[pipe] = job
                    pipe.send(job)
        for pipe in wait(list(busy), 0.5):
            job = busy.pop(pipe)
            try:
                finished, error, seconds = pipe.recv()
            except (EOFError, OSError):
                finished, error, seconds = False, "its process ended", 0.0
            else:
                free.append(pipe)
            if error and isinstance(job, Measurement):
                unmeasured.append(error)
            elif error:
                failed[job.digest] = error
            elif finished and not isinstance(job, Measurement):
                done += 1
                note_sharing(job.folder, len(busy) + 1)
                measuring.extend(queue.measurements())
            line = {
                "job": job.title,
                "finished": finished,
                "error": error,
                "seconds": round(seconds, 1),
                "at": round(time.monotonic() - begin, 1),
                "busy": len(busy) + 1,
            }
            print(json.dumps(line), flush=True)
            late = time.monotonic() - saved > STORE_SECONDS
            if (late or not waiting) and not stop.is_set():
                queue.store(options.cache, failed)
                saved = time.monotonic()
                new = [job for digest, job in queue.jobs.items() if digest not in known]
                known.update(job.digest for job in new)
                waiting = sorted(waiting + new, key=lambda job: queue.ranks[job.digest])
            if options.log:
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(line) + "\n")
    queue.store(options.cache, failed, with_measures=True)  # before the processes end, slowly
    for pipe in workers:
        with suppress(OSError):
            pipe.send(None)
    end = time.monotonic() + END_SECONDS
    for process in workers.values():
        process.join(max(0.0, end - time.monotonic()))
        process.kill()  # all results are on the disk
    taken = f"{time.monotonic() - begin:.0f} s"
    print(f"{done} finished, {len(failed)} failed, {len(unmeasured)} not measured, {taken}")
    sys.exit(1 if failed or unmeasured else 0)


if __name__ == "__main__":
    main()
