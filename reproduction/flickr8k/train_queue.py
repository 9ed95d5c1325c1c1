"""Train the runs of several tables in one queue, by processes that last.

    python reproduction/flickr8k/train_queue.py QUEUE.yaml --jobs 10 --seconds 540

QUEUE.yaml is a list of what `counterfoil reproduce` takes, in the order of priority:

    - name: flickr8k.rates
      data: lite2-36
      seeds: 1
      rows: [VSE*]
      values: [0.001, 0.002]
      climb: true
      overrides: [train.precision=bf16]
      store: results
    - name: flickr8k.naaf
      data: lite2-36
      tuned: [results/flickr8k.rates@lite2-36.json]
      store: results

``values`` selects points of a sweep. With ``climb``, a line whose best value is at an edge of what
was tried gets the next one, until it is inside: give it two values to start from, or none if the
store has some, and values far from the best are not trained. A run whose result is in ``store`` is
not trained. Every process imports PyTorch, starts the GPU and reads the data once, and then trains
one run after the other, so that short runs do not wait for these. After ``--seconds``, runs save
themselves; the same call goes on. Recalls are stored meanwhile and at the end. Foils and words that
the table shows are measured by the process that trained the run, unless another run writes the
foils; `counterfoil reproduce` finds the runs and their measures finished, and stores the whole
table.

Only what a table does not use is left out of a run: its page, example searches, and the yardstick
of its explanations. What a finished run needs only to be resumed is deleted.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import shutil
import sys
import time
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import yaml

from counterfoil.cli.reproduce import _plan, _Request
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


class Queue:
    """The missing jobs of all entries by digest, and for each the first entry that wants it."""

    def __init__(self, path: Path, out: Path) -> None:
        self.jobs: dict[str, Job] = {}
        self.ranks: dict[str, int] = {}
        self.plans: list[tuple[Plan, ResultCache]] = []
        self.climbing: set[int] = set()
        for rank, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))):
            self._read(rank, entry, out)

    def _read(self, rank: int, entry: dict[str, Any], out: Path) -> None:
        request = _Request(
            entry.get("data", "scenes"),
            entry.get("published"),
            entry.get("scale", "full"),
            int(entry.get("seeds", 3)),
            tuple(entry.get("overrides", [])),
            tuple(map(Path, entry.get("tuned", []))),
        )
        plan, order = _plan(entry["name"], request, entry.get("rows", []), out)
        store = Path(entry["store"])
        known = read_stored(store / stored_name(plan))
        if isinstance(plan.artifact, Sweep):
            plan = make_plan(with_tried(plan.artifact, known), plan.settings, plan.out)
        stored = ResultCache(store, plan, order)
        stored.skip_known()
        self.plans.append((plan, stored))
        values = entry.get("values")
        selected = None
        if values is not None and isinstance(plan.artifact, Sweep):
            points = plan.artifact.points
            selected = {point.title for point in points if point.value in values}
            unknown = set(values) - {point.value for point in points}
            if unknown:
                raise SystemExit(f"{entry['name']}: no such value of the sweep: {sorted(unknown)}")
        self._want(rank, plan, selected)
        if entry.get("climb"):
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

    def measurements(self, digest: str) -> list[tuple[FoilOptions, MeasureColumn, PlannedRun]]:
        """Columns of the tables that can be measured as soon as a run is finished."""
        return [
            (plan.artifact.foils, column, members[0])
            for plan, _ in self.plans
            if isinstance(plan.artifact, Measured)
            for row in table_rows(plan)
            for members in row.runs
            if len(members) == 1 and members[0].digest == digest
            for column in (given.of_row(row.foils, row.blind) for given in plan.artifact.measures)
            if not column.writer
        ]

    def store(self, cache_folder: Path, errors: dict[str, str]) -> None:
        """Store the recalls of the runs that are finished; lines that climb may want more runs."""
        for rank, (plan, stored) in enumerate(self.plans):
            evaluator = RunEvaluator(plan.out / "evaluations", cache_folder, Silent())
            now = collect(plan, Outcome(errors), evaluator, with_measures=False)
            total = stored.add(now)
            if rank in self.climbing:
                self._climb(rank, plan, latest(total, now))


def _begin(cache_folder: Path) -> None:
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


def serve(pipe: Connection, out: Path, cache_folder: Path, stop: Any) -> None:
    """Train and measure one job after the other, as they come through the pipe."""
    import torch

    from counterfoil.reproduce.runner import describe, do_one

    torch.set_num_threads(1)
    _begin(cache_folder)
    evaluator = RunEvaluator(out / "evaluations", cache_folder, Silent())
    measures: dict[str, MeasureEvaluator] = {}
    while True:
        received = pipe.recv()
        if received is None:
            return
        job, columns = received
        started = time.monotonic()
        finished, error = False, None
        try:
            finished = do_one(job, cache_folder, Silent(), should_stop=stop.is_set)
            if finished and (job.folder / "best").is_dir():
                shutil.rmtree(job.folder / "last", ignore_errors=True)
            for options, column, run in columns if finished else ():
                key = options.model_dump_json()
                if key not in measures:
                    measures[key] = MeasureEvaluator(evaluator, options)
                if not stop.is_set():
                    with suppress(Exception):  # `counterfoil reproduce` meets it again, and says so
                        measures[key].number(column, run, None)
        except Exception as problem:  # one failed run must not stop the others
            error = describe(problem)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        pipe.send((job.digest, finished, error, time.monotonic() - started))


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
    for _ in range(min(options.jobs, len(waiting))):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, options.out, options.cache, stop))
        process.start()
        theirs.close()
        workers[ours] = process
    saved = begin
    free, busy, failed, done = list(workers), dict[Connection, Job](), dict[str, str](), 0
    known = set(queue.jobs)
    while waiting or busy:
        if time.monotonic() - begin > options.seconds and not stop.is_set():
            stop.set()
            print(f"time is up: {len(waiting)} jobs not begun, {len(busy)} stopped", flush=True)
        if stop.is_set():
            waiting.clear()
        for job in list(waiting):
            needs = [need.digest for need in job.needs]
            if any(need in failed for need in needs):
                failed[job.digest] = "needs a job that failed"
                waiting.remove(job)
            elif free and job.digest not in failed:
                open_ = {other.digest for other in (*waiting, *busy.values())}
                if not any(need in open_ for need in needs):
                    waiting.remove(job)
                    pipe = free.pop()
                    busy[pipe] = job
                    pipe.send((job, queue.measurements(job.digest)))
        for pipe in wait(list(busy), 0.5):
            job = busy.pop(pipe)
            try:
                digest, finished, error, seconds = pipe.recv()
            except (EOFError, OSError):
                failed[job.digest] = error = "its process ended"
                digest, finished, seconds = job.digest, False, 0.0
            else:
                free.append(pipe)
            if error:
                failed[digest] = error
            elif finished:
                done += 1
                note_sharing(job.folder, len(busy) + 1)
            line = {
                "job": job.title,
                "finished": finished,
                "error": error,
                "seconds": round(seconds, 1),
            }
            line |= {
                "at": round(time.monotonic() - begin, 1),
                "busy": len(busy) + 1,
                "folder": job.folder.name,
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
    queue.store(options.cache, failed)  # before the processes end, which may take long
    for pipe in workers:
        with suppress(OSError):
            pipe.send(None)
    end = time.monotonic() + END_SECONDS
    for process in workers.values():
        process.join(max(0.0, end - time.monotonic()))
        process.kill()  # all results are on the disk
    print(f"{done} finished, {len(failed)} failed, {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
