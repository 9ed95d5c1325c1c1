"""The service under attack: what clients see, how fast health checks are, how memory grows.

    python benchmarks/service_faults.py                 # short: some minutes
    python benchmarks/service_faults.py --full          # the numbers of docs/reliability-service.md
    python benchmarks/service_faults.py --parts uploads slow --json faults.json

Every part runs against `counterfoil serve` in a process of its own, on the loopback address. A
failure is a status of 500 or more that is not a 503 with Retry-After, an answer that does not match
the OpenAPI document, or a connection that ends without an answer outside of a restart. The program
exits with 1 if there was one, or if memory grew by 50 MiB. Counts and times are bounded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import _service_parts as parts
import numpy as np
from _service_parts import Sizes
from _service_process import HEALTH_MS, Service, serving

MEMORY_MIB = 50.0
MODEL, CORRECTOR = "scenes-naaf", "scenes-corrector"
FULL = Sizes(
    uploads=10_000, examples=150, slow_clients=400, slow_seconds=60.0, gone=3000,
    load_seconds=600.0, library=1_000_000, library_searches=500, runs=100, run_reads=500,
)  # fmt: skip

PARTS: dict[str, Callable[[Service, Sizes], dict[str, Any]]] = {
    "uploads": parts.uploads,
    "schema": parts.schema,
    "slow": parts.slow,
    "gone": parts.gone,
    "runs": parts.runs,
    "load": parts.load,
    "library": parts.library,
}
"""In this order; all but the last share one service, so that what one leaves meets the next."""

WORDS = "a the one two red blue small large dog cat tree house car boat kite near under on"


def counterfoil(*arguments: str) -> None:
    command = [sys.executable, "-m", "counterfoil", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def make_audit(folder: Path) -> Path:
    """Findings to page through and decide on."""
    if folder.exists():
        return folder
    few = ["--option", "images=[0,0,60]", "--split", "test", "--threshold", "0.01"]
    few += ["--examine", "20", "--details", "10"]
    counterfoil("audit", MODEL, "scenes", *few, "--out", str(folder))
    return folder


def make_runs(folder: Path, count: int) -> Path:
    """One small run, many times."""
    settings = ["data.source=scenes", "data.options.images=[60,10,20]", "model.name=rvse-mlp"]
    settings += ["model.embed_size=16", "train.epochs=2", "train.batch_size=32"]
    first = folder / "run-0"
    if len(list(folder.glob("run-*"))) == count:
        return folder
    counterfoil("train", *settings, "evaluation.bootstrap=0", "--out", str(first))
    for number in range(1, count):
        shutil.copytree(first, folder / f"run-{number}")
    return folder


def make_library(folder: Path, images: int) -> Path:
    """An index of images that are one vector each, with one caption each, in the ``exact`` form."""
    if (folder / "index").exists():
        return folder / "index"
    import counterfoil as cf
    from counterfoil.core.storage.arrays import ArrayFile
    from counterfoil.data.fragments import FragmentTable
    from counterfoil.data.pairs import Pairs, Split

    rng = np.random.default_rng(0)
    np.save(folder / "ims.npy", rng.normal(size=(images, 1, 16)).astype(np.float32))
    words = WORDS.split()
    drawn = rng.integers(0, len(words), size=(images, 5))
    texts = [[" ".join(words[word] for word in row)] for row in drawn]
    whole = np.ones(images, dtype=np.int64)
    table = FragmentTable(ArrayFile(folder / "ims.npy"), np.arange(images), whole)
    ids = [f"image-{number}" for number in range(images)]
    split = Split(name="train", ids=ids, captions=texts, fragments=table)
    model = cf.create("vse-fc", Pairs("made", {"train": split}), embed_size=32)
    cf.build_index(model, split, folder / "index")
    return folder / "index"


@contextmanager
def main_service(folder: Path, wanted: list[str], sizes: Sizes) -> Iterator[Service]:
    arguments = [MODEL, "--corrector", CORRECTOR]
    if "schema" in wanted:
        arguments += ["--audit", str(make_audit(folder / "audit"))]
    if {"runs", "schema"} & set(wanted):
        arguments += ["--runs", str(make_runs(folder / "runs", sizes.runs))]
    with serving(folder / "service", *arguments) as service:
        warm = replace(sizes, uploads=100, run_reads=20)
        parts.uploads(service, warm)  # models loaded, buffers and the store of uploads filled
        if "--runs" in arguments:
            parts.runs(service, warm)
        yield service


def measure(service: Service, name: str, sizes: Sizes) -> dict[str, Any]:
    started, before = time.perf_counter(), service.errors_logged()
    row = {"part": name, **PARTS[name](service, sizes)}
    row["errors_logged"] = service.errors_logged() - before
    row["seconds"] = time.perf_counter() - started
    grown = row["memory_growth_mib"] >= MEMORY_MIB
    row["passed"] = not (row["failures"] or row["errors_logged"] or grown)
    print(cells(row), flush=True)
    for failure in row["failures"][:5]:
        print(f"  {name}: {failure}", file=sys.stderr)
    return row


HEADS = ("part", "tries", "answers", "failures", "p50 ms", "p99 ms", "p99/p50", "memory growth MiB",
         "health p50 / p99 / max ms", "control p99 / max ms", "late: health, control",
         "event loop ran / waited s")  # fmt: skip


def cells(row: dict[str, Any]) -> str:
    answers = ", ".join(f"{status}: {count}" for status, count in row["statuses"].items())
    health = "health_p50_ms", "health_p99_ms", "health_max_ms"
    values = [
        row["part"],
        row["tries"],
        answers,
        len(row["failures"]) + row["errors_logged"],
        f"{row['p50_ms']:.1f}",
        f"{row['p99_ms']:.0f}",
        f"{row['p99_to_p50']:.1f}",
        f"{row['memory_growth_mib']:+.0f}",
        " / ".join(f"{row[key]:.0f}" for key in health),
        f"{row['control_p99_ms']:.0f} / {row['control_max_ms']:.0f}",
        f"{row['health_late']}, {row['control_late']} of {row['health_checks']}",
        f"{row['loop_ran_s']:.0f} / {row['loop_waited_s']:.0f}",
    ]
    return "| " + " | ".join(map(str, values)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--full", action="store_true", help="the large counts and times")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--folder", type=Path, help="keep audit, runs and library here for reuse")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    for name, default in vars(Sizes()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), help=f"default: {default}")
    options = parser.parse_args()
    sizes = FULL if options.full else Sizes()
    given = {name: getattr(options, name) for name in vars(sizes)}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"| {' | '.join(HEADS)} |\n|" + " --- |" * len(HEADS), flush=True)
    rows, wanted = [], [name for name in PARTS if name in options.parts]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if wanted != ["library"]:
            with main_service(folder, wanted, sizes) as service:
                rows += [measure(service, name, sizes) for name in wanted if name != "library"]
        if "library" in wanted:
            with serving(folder / "million", str(make_library(folder, sizes.library))) as service:
                rows.append(measure(service, "library", sizes))
    late = sum(row["health_late"] for row in rows)
    print(f"health checks of {HEALTH_MS:.0f} ms or more: {late}; see the column of the control")
    if options.json is not None:
        options.json.write_text(json.dumps({"sizes": vars(sizes), "rows": rows}, indent=2))
    if not all(row["passed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
