"""The first stage of a search over many vectors: latency, recall and memory of each backend.

    python benchmarks/search_million.py --items 1000000 --dim 256 --queries 200

Vectors are synthetic: clusters of unequal size on the unit sphere, in half precision on disk; a
query is an item with noise, as a caption is near its image. Each backend builds its index from the
same file and answers in processes of its own, one query at a time, so that memory and latency are
its own. Recall@10 is against "exact", which compares every vector; recall in 200 is the share of
these ten in the shortlist that a matcher would rank. "anonymous" is memory that the process holds
itself; "resident" also counts pages of mapped files, which the system takes back when it needs
them. Backends that are not installed are left out.
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
from pathlib import Path

import numpy as np

from counterfoil.search import Vectors, backends

FORMS = {
    "exact": ("exact", {}),
    "faiss hnsw": ("faiss", {"kind": "hnsw"}),
    "faiss ivfpq": ("faiss", {"kind": "ivfpq"}),
}
BLOCK = 50_000
SHORTLIST = 200
VECTORS = ("items", "dim", "clusters", "spread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--clusters", type=int, default=2000)
    parser.add_argument("--spread", type=float, default=0.6, help="noise around a cluster")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--forms", nargs="*", choices=list(FORMS), default=list(FORMS))
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the indexes here, and use those that are; default: deleted",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--build", choices=list(FORMS), help=argparse.SUPPRESS)
    parser.add_argument("--ask", choices=list(FORMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build or options.ask:
        row = build(options, options.build) if options.build else ask(options, options.ask)
        print(json.dumps(row))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        make_vectors(options)
        rows = []
        for form in options.forms:
            if FORMS[form][0] == "faiss" and not importlib.util.find_spec("faiss"):
                print(f"{form}: not installed, left out")
                continue
            built = in_own_process(options, "--build", form)
            rows.append(built | in_own_process(options, "--ask", form))
        report(options, rows)


def make_vectors(options: argparse.Namespace) -> None:
    """`vectors.npy` [items, dim] and `queries.npy`, written block by block."""
    rng = np.random.default_rng(0)
    centers = unit(rng.normal(size=(options.clusters, options.dim)))
    share = rng.pareto(1.5, size=options.clusters) + 0.1
    path = options.folder / "vectors.npy"
    shape = (options.items, options.dim)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    for start in range(0, options.items, BLOCK):
        count = min(BLOCK, options.items - start)
        of = rng.choice(options.clusters, size=count, p=share / share.sum())
        noise = rng.normal(size=(count, options.dim)) / options.dim**0.5
        out[start : start + count] = unit(centers[of] + options.spread * noise)
    out.flush()
    chosen = rng.choice(options.items, size=options.queries)
    noise = rng.normal(size=(options.queries, options.dim)) / options.dim**0.5
    queries = unit(out[chosen].astype(np.float32) + 0.5 * options.spread * noise)
    np.save(options.folder / "queries.npy", queries.astype(np.float32))


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def in_own_process(options: argparse.Namespace, task: str, form: str) -> dict:
    keys = (*VECTORS, "queries", "folder")
    arguments = [f"--{key}={getattr(options, key)}" for key in keys]
    done = subprocess.run(
        [sys.executable, __file__, *arguments, task, form],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # as the command line does
    )
    return json.loads(done.stdout.splitlines()[-1])


def build(options: argparse.Namespace, form: str) -> dict:
    name, settings = FORMS[form]
    folder = options.folder / form.replace(" ", "-")
    told = options.folder / f"{folder.name}.json"
    asked = {key: getattr(options, key) for key in VECTORS} | {"settings": settings}
    if told.exists() and (before := json.loads(told.read_text()))["of"] == asked:
        return before["built"]
    told.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # of other vectors, or half of it
    rows = np.load(options.folder / "vectors.npy", mmap_mode="r")
    started = time.perf_counter()
    index = backends[name].create(folder, rows.shape[1], False, "float16", settings)
    step = 4 * BLOCK
    for start in range(0, len(rows), step):
        part = Vectors.single(rows[start : start + step])
        index.add(np.arange(start, start + len(part)), part)
    built = {"build_s": time.perf_counter() - started}
    told.write_text(json.dumps({"of": asked, "built": built}))
    return built


def ask(options: argparse.Namespace, form: str) -> dict:
    """One query at a time, on an index that has just been opened."""
    name, settings = FORMS[form]
    folder = options.folder / form.replace(" ", "-")
    index = backends[name].open(folder, settings)
    queries = np.load(options.folder / "queries.npy")
    index.search(Vectors.single(queries[:1]), SHORTLIST)  # maps and caches are warm
    seconds, found = [], []
    for query in queries:
        before = time.perf_counter()
        ids, _ = index.search(Vectors.single(query), SHORTLIST)
        seconds.append(time.perf_counter() - before)
        found.append(ids[0])
    np.save(options.folder / f"{folder.name}.npy", np.array(found))
    p50, p95 = np.percentile(seconds, [50, 95])
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    row = {"form": form, "p50_ms": 1000 * p50, "p95_ms": 1000 * p95, "disk_mb": size / 1e6}
    return {**row, **memory(), **index.describe()}


def memory() -> dict[str, float]:
    """Resident and anonymous memory of this process now, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return {
        "resident_mb": int(kilobytes["VmRSS"]) / 1e3,
        "anonymous_mb": int(kilobytes["RssAnon"]) / 1e3,
    }


def report(options: argparse.Namespace, rows: list[dict]) -> None:
    truth = None
    if (options.folder / "exact.npy").exists():
        truth = np.load(options.folder / "exact.npy")[:, :10]
    print(f"{options.items:,} vectors of {options.dim}, {options.queries} queries")
    columns = ["p50 ms", "p95 ms", "recall@10", "in 200", "anonymous MB", "resident MB", "disk MB"]
    print("| first stage | " + " | ".join([*columns, "build s"]) + " |")
    print("| --- |" + " --- |" * (len(columns) + 1))
    for row in rows:
        if truth is not None:
            found = np.load(options.folder / f"{row['form'].replace(' ', '-')}.npy")
            row["recall@10"] = overlap(truth, found[:, :10])
            row["recall_in_200"] = overlap(truth, found)
        cells = [
            f"{row['p50_ms']:.1f}",
            f"{row['p95_ms']:.1f}",
            f"{row.get('recall@10', float('nan')):.3f}",
            f"{row.get('recall_in_200', float('nan')):.3f}",
            f"{row['anonymous_mb']:,.0f}",
            f"{row['resident_mb']:,.0f}",
            f"{row['disk_mb']:,.0f}",
            f"{row['build_s']:.0f}",
        ]
        print(f"| {row['form']} | " + " | ".join(cells) + " |")
    if options.json:
        tree = {"items": options.items, "dim": options.dim, "queries": options.queries}
        options.json.write_text(json.dumps({**tree, "forms": rows}, indent=2))


def overlap(truth: np.ndarray, found: np.ndarray) -> float:
    pairs = zip(truth, found, strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in pairs]))


if __name__ == "__main__":
    main()
