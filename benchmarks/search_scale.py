"""Search in 100 thousand to 10 million vectors: recall, speed and size of every precision.

    counterfoil index photos-naaf flickr8k/ --split test --first-stage fitted --out flickr8k-test
    python benchmarks/search_scale.py --index flickr8k-test --folder scale --minutes 150 \\
        --page docs/results/search.md

Images and captions are resampled from the fragments of the index (`_resampled_fragments.py`).
Captions search for images, and images for captions. Each form of the first stage has an index and a
process of its own, and the processes take turns: a round is all queries, one at a time. The best
round counts. Recall@10 is against comparing every vector in float32.

A stopped run is continued by the same command. With --minutes no step starts after that time, and
the report has what there is. Ten million vectors need 25 GB of disk and 3 GB of memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _resampled_fragments import BLOCK, Resampled, real_vectors
from _search_report import write_page

from counterfoil.encoders import Encoded
from counterfoil.search import SearchIndex, Vectors, backends
from counterfoil.search.codes import Coded
from counterfoil.search.fde import FdeOptions, FixedEncoding
from counterfoil.search.first_stage import FirstStageProxy, fragment_dim
from counterfoil.search.items import Side
from counterfoil.search.query import scores_of
from counterfoil.search.vectors import TopK, max_sim

SHORTLIST, DEPTH = 200, 10
PART = 250_000
"""Vectors added at once."""


@dataclass(frozen=True)
class Form:
    """A way of searching; ``most`` vectors fit into 3 GB of memory."""

    backend: str
    dtype: str
    options: dict[str, Any]
    most: int = 10_000_000


FORMS = {
    "half": Form("exact", "float16", {}, 5_000_000),
    "int8": Form("exact", "int8", {}),
    "binary": Form("exact", "binary", {}),
    "faiss ivfpq": Form("faiss", "int8", {"kind": "ivfpq", "lists": 4096}),
    "faiss hnsw": Form("faiss", "float16", {"kind": "hnsw"}, 2_000_000),
}
WAYS: dict[str, tuple[Side, Side]] = {
    "text": ("captions", "images"),
    "image": ("images", "captions"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--index", type=Path, required=True, help="index of a matcher of fragments")
    parser.add_argument("--folder", type=Path, required=True, help="for vectors, indexes, results")
    sizes = [100_000, 1_000_000, 10_000_000]
    parser.add_argument("--vectors", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument("--dim", type=int, default=256, help="directions of a fitted first stage")
    parser.add_argument("--queries", type=int, default=100, help="of each direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--items", type=int, default=10_000, help="to compare first stages on; 0: none"
    )
    parser.add_argument("--minutes", type=float, default=150, help="no step starts after this time")
    parser.add_argument("--page", type=Path, help="Markdown file to write")
    parser.add_argument("--worker", nargs=3, metavar=("FORM", "WAY", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--build", nargs=3, metavar=("FORM", "WAY", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(json.dumps(build(options, *_job(options.build))))
    elif options.worker:
        serve(options, *_job(options.worker))
    else:
        Run(options).all_steps()


def _job(words: list[str]) -> tuple[str, str, int]:
    return words[0], words[1], int(words[2])


class Run:
    """The steps in order; results of finished ones are in ``results.json``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "results.json"
        self.steps: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.end = time.monotonic() + 60 * options.minutes
        self.forms = [
            name
            for name in options.forms
            if FORMS[name].backend != "faiss" or importlib.util.find_spec("faiss")
        ]

    def all_steps(self) -> None:
        options = self.options
        finished = True
        for count in sorted(options.vectors):
            for way in options.ways:
                finished = finished and self.way(way, count)
        if options.items:
            finished = finished and self.step("first stages", lambda: compare_first_stages(options))
        if options.page:
            write_page(options.page, self.steps, _settings(options))
        print(json.dumps(self.steps, indent=1))
        if not finished:
            print(f"stopped after {options.minutes} minutes; run the command again to continue")

    def step(self, name: str, work: Callable[[], Any], again: bool = False) -> bool:
        """Do a step unless it is done; False if the time is up."""
        if name in self.steps and not again:
            return True
        if time.monotonic() > self.end:
            return False
        started = time.perf_counter()
        self.steps[name] = work()
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.steps, indent=1))
        temporary.replace(self.path)
        return True

    def way(self, way: str, count: int) -> bool:
        """Vectors, exact results, an index of each form, then the rounds of all of them.

        Forms that an earlier call measured are left out.
        """
        options, name = self.options, f"{way} {count}"
        known = self.steps.get(f"rounds {name}", {})
        forms = [f for f in self.forms if count <= FORMS[f].most and f not in known]
        if not forms:
            return True
        finished = self.step(f"truth {name}", lambda: find_truth(options, way, count))
        for form in forms:
            job = (form, way, str(count))
            finished = finished and self.step(
                f"build {form} {name}", lambda job=job: json.loads(_child(options, "--build", job))
            )
        if finished:
            finished = self.step(
                f"rounds {name}", lambda: known | rounds(options, forms, way, count), again=True
            )
        if finished:
            for form in forms:
                shutil.rmtree(_folder(options, form, way, count), ignore_errors=True)
        return finished


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("dim", "queries", "rounds", "items")
    return {name: getattr(options, name) for name in names} | {"shortlist": SHORTLIST}


def _folder(options: argparse.Namespace, form: str, way: str, count: int) -> Path:
    return options.folder / f"{form.replace(' ', '-')}-{way}-{count}"


def _rows(options: argparse.Namespace, way: str, count: int) -> np.ndarray:
    queries = np.load(options.folder / f"queries-{way}.npy")
    path = options.folder / f"{WAYS[way][1]}.f16"
    return np.memmap(path, dtype=np.float16, mode="r").reshape(-1, queries.shape[1])[:count]


def find_truth(options: argparse.Namespace, way: str, count: int) -> dict[str, float]:
    """Make the vectors, and save the ten best of every query."""
    source, target = WAYS[way]
    index = SearchIndex.open(options.index, device="cpu")
    queries = real_vectors(index, source, options.dim, options.queries)
    np.save(options.folder / f"queries-{way}.npy", queries)
    started = time.perf_counter()
    Resampled(index, target).write(options.folder / f"{target}.f16", count, options.dim)
    seconds = time.perf_counter() - started
    rows, best = _rows(options, way, count), TopK(len(queries), DEPTH)
    left = torch.from_numpy(queries)
    for start in range(0, count, 1 << 16):
        part = torch.from_numpy(rows[start : start + (1 << 16)].astype(np.float32))
        best.update(np.arange(start, start + len(part)), left @ part.T)
    np.save(options.folder / f"truth-{way}-{count}.npy", best.result()[0])
    return {"making_s": seconds, "dim": queries.shape[1]}


def build(options: argparse.Namespace, form: str, way: str, count: int) -> dict[str, float]:
    """An index of one form; seconds and peak memory."""
    folder, settings = _folder(options, form, way, count), FORMS[form]
    shutil.rmtree(folder, ignore_errors=True)  # half of an index
    rows = _rows(options, way, count)
    started = time.perf_counter()
    own = settings.options
    # FAISS is trained on all rows, so it sees them when the last part is there
    waiting = {"least": count} if settings.backend == "faiss" else {}
    kind = backends[settings.backend]
    index = kind.create(folder, rows.shape[1], False, settings.dtype, own | waiting)
    for start in range(0, count, PART):
        part = Vectors.single(rows[start : start + PART])
        index.add(np.arange(start, start + len(part)), part)
    index.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"build_s": time.perf_counter() - started, "bytes": size, **_memory()}


def serve(options: argparse.Namespace, form: str, way: str, count: int) -> None:
    """Open an index, then run a round for every line read."""
    settings = FORMS[form]
    folder = _folder(options, form, way, count)
    index = backends[settings.backend].open(folder, settings.options)
    queries = np.load(options.folder / f"queries-{way}.npy")
    truth = np.load(options.folder / f"truth-{way}-{count}.npy")
    index.search(Vectors.single(queries[:1]), SHORTLIST)  # files and caches are warm
    for _ in sys.stdin:
        seconds, shares, at_ten, busy = [], [], [], 0.0
        for query, best in zip(queries, truth, strict=True):
            before, cpu = time.perf_counter(), time.process_time()
            ids, _ = index.search(Vectors.single(query), SHORTLIST)
            seconds.append(time.perf_counter() - before)
            busy += time.process_time() - cpu
            shares.append(len(set(ids[0]) & set(best)) / len(best))
            at_ten.append(len(set(ids[0, :DEPTH]) & set(best)) / len(best))
        row = {
            "mean_ms": 1000 * float(np.mean(seconds)),
            "cpu_ms": 1000 * busy / len(queries),
            "p95_ms": 1000 * float(np.percentile(seconds, 95)),
            "recall": float(np.mean(at_ten)),
            "in_shortlist": float(np.mean(shares)),
            "load": os.getloadavg()[0],
            **_memory(),
        }
        print(json.dumps(row), flush=True)


def rounds(options: argparse.Namespace, forms: list[str], way: str, count: int) -> dict[str, Any]:
    """Of every form its fastest round, and all of them."""
    workers = {
        form: subprocess.Popen(
            _command(options, "--worker", (form, way, str(count))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # as the command line does
        )
        for form in forms
    }
    rows: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
    try:
        for _ in range(options.rounds):
            for form, worker in workers.items():
                assert worker.stdin is not None
                assert worker.stdout is not None
                print("go", file=worker.stdin, flush=True)
                rows[form].append(json.loads(worker.stdout.readline()))
    finally:
        for worker in workers.values():
            worker.communicate()  # closes its input, which ends it
    return {
        form: min(parts, key=lambda row: row["mean_ms"])
        | {"all_mean_ms": [round(row["mean_ms"], 3) for row in parts]}
        for form, parts in rows.items()
    }


def _command(options: argparse.Namespace, task: str, job: tuple[str, ...]) -> list[str]:
    keys = ("index", "folder", "dim", "queries")
    arguments = [f"--{key}={getattr(options, key)}" for key in keys]
    return [sys.executable, __file__, *arguments, task, *job]


def _child(options: argparse.Namespace, task: str, job: tuple[str, ...]) -> str:
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = _command(options, task, job)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout.splitlines()[-1]


def _memory() -> dict[str, float]:
    """Peak of resident memory, and memory that is no mapped file, of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return {
        "peak_mb": int(kilobytes["VmHWM"]) / 1e3,
        "anonymous_mb": int(kilobytes["RssAnon"]) / 1e3,
    }


@torch.inference_mode()
def compare_first_stages(options: argparse.Namespace) -> dict[str, Any]:
    """Share of the ten best by the matcher, and by MaxSim, in the shortlist of each first stage."""
    index = SearchIndex.open(options.index, device="cpu")
    dim = fragment_dim(index.encoder)
    proxies = {"pooled": FirstStageProxy(index.model, "pooled")}
    if index.proxy.form == "fitted":
        proxies["fitted"] = index.proxy
    for width in (1024, 4096):
        fde = FixedEncoding.draw(dim, FdeOptions(dim=width))
        proxies[f"fde, {fde.dim} numbers"] = FirstStageProxy(index.model, "fde", None, fde)
    proxies["maxsim"] = FirstStageProxy(index.model, "maxsim")
    return {way: _compare(options, index, way, proxies) for way in options.ways}


def _compare(
    options: argparse.Namespace, index: SearchIndex, way: str, proxies: dict[str, Any]
) -> dict[str, Any]:
    source, target = WAYS[way]
    keys = index.items[source].table.live_ids
    chosen = np.random.default_rng(0).choice(keys, min(20, len(keys)), replace=False)
    queries: Encoded = index.items[source].encoded(np.sort(chosen))
    made = Resampled(index, target)
    stages = [(name, dtype) for name in proxies for dtype in ("float16", "int8", "binary")]
    truths = {"matcher": TopK(len(queries), DEPTH), "maxsim": TopK(len(queries), DEPTH)}
    vectors = {name: proxy.vectors(queries, source, "query") for name, proxy in proxies.items()}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        indexes = {
            (name, dtype): backends["exact"].create(
                Path(scratch, f"{name}-{dtype}"), vectors[name].rows.shape[1], name == "maxsim",
                dtype, {},
            )
            for name, dtype in stages
        }  # fmt: skip
        for start in range(0, options.items, BLOCK):
            items = made.block(start // BLOCK, min(BLOCK, options.items - start))
            ids = np.arange(start, start + len(items))
            truths["matcher"].update(ids, scores_of(index.model, target, queries, items))
            for name, proxy in proxies.items():
                rows = proxy.vectors(items, target)
                for dtype in ("float16", "int8", "binary"):
                    indexes[name, dtype].add(ids, rows)
                if name == "maxsim":
                    sims = Coded(rows.rows).products(vectors[name].rows)
                    truths["maxsim"].update(ids, max_sim(sims, vectors[name], rows.lengths))
        return {
            f"{name}, {dtype}": _first_stage(indexes[name, dtype], vectors[name], truths)
            for name, dtype in stages
        }


def _first_stage(index: Any, queries: Vectors, truths: dict[str, TopK]) -> dict[str, float]:
    index.search(queries[:1], SHORTLIST)
    started = time.perf_counter()
    rows = [index.search(queries[i : i + 1], SHORTLIST)[0][0] for i in range(len(queries))]
    seconds = (time.perf_counter() - started) / len(queries)
    shares = {name: _share(truth.result()[0], np.array(rows)) for name, truth in truths.items()}
    size = index.describe()["bytes"] / len(index)
    return {"bytes": size, "ms": 1000 * seconds, **shares}


def _share(truth: np.ndarray, result: np.ndarray) -> float:
    pairs = zip(truth, result, strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in pairs]))


if __name__ == "__main__":
    main()
