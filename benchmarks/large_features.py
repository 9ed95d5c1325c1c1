"""Train on a feature file far larger than memory, and print how much memory that took.

    python benchmarks/large_features.py --gigabytes 20 --steps 30

The file is sparse (it takes no room on disk) apart from a few rows, but it is read as any other:
opening it costs a header, a step costs its batch. Exits with 1 where the resident memory, or the
growth of it, is above the limit.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.lib.format import write_array_header_2_0

from counterfoil.core.config import build_config
from counterfoil.training.run import execute

REGIONS, DIM = 36, 2048


def make_data(folder: Path, gigabytes: float) -> int:
    rows = max(200, int(gigabytes * 1e9 / (REGIONS * DIM * 4)))
    rng = np.random.default_rng(0)
    colors = ["red", "blue", "green", "white", "black"]
    things = ["dog", "cat", "car", "tree", "house", "boat"]
    for split, images in {"train": rows, "dev": 100}.items():
        with (folder / f"{split}_ims.npy").open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (images, REGIONS, DIM)}
            write_array_header_2_0(file, header)
            start = file.tell()
            file.truncate(start + images * REGIONS * DIM * 4)
            for row in range(0, images, max(1, images // 50)):
                file.seek(start + row * REGIONS * DIM * 4)
                file.write(rng.normal(size=(REGIONS, DIM)).astype("<f4").tobytes())
        with (folder / f"{split}_caps.txt").open("w", encoding="utf-8") as file:
            for image in range(images):
                for k in range(5):
                    a, b = colors[(image + k) % 5], things[(image * 7 + k) % 6]
                    file.write(f"a {a} {b} number {image % 997} beside a {things[k]}\n")
        ids = "\n".join(str(10_000_000 + i) for i in range(images))
        (folder / f"{split}_ids.txt").write_text(ids + "\n")
    return rows


def resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit-mb", type=float, default=2000.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "f30k_precomp"
        folder.mkdir()
        rows = make_data(folder, options.gigabytes)
        size = (folder / "train_ims.npy").stat().st_size
        before = resident_mb()
        config = build_config(
            {
                "data": {"source": str(folder)},
                "model": {"name": "vse-infty", "embed_size": 256, "text": {"word_dim": 64}},
                "train": {"epochs": 1, "batch_size": 128, "log_every": 10},
            }
        )
        asked = iter(range(10**9))
        started = time.monotonic()
        finished = execute(
            config,
            Path(temporary) / "run",
            Path(temporary) / "cache",
            should_stop=lambda: next(asked) + 1 >= options.steps,
        )
        seconds = time.monotonic() - started
    peak = resident_mb()
    result = {
        "file_gb": round(size / 1e9, 2),
        "images": rows,
        "steps": finished.result.steps,
        "seconds": round(seconds, 1),
        "resident_mb_before": round(before),
        "resident_mb_peak": round(peak),
        "file_over_peak": round(size / 1e6 / peak, 1),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['file_gb']} GB of features ({rows:,} images): {result['steps']} steps in "
            f"{seconds:.0f} s, peak resident memory {peak:.0f} MB ({before:.0f} MB of it before "
            f"any data), the file is {result['file_over_peak']} times that"
        )
    return 0 if peak < options.limit_mb else 1


if __name__ == "__main__":
    sys.exit(main())
