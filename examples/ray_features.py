"""Features of a large data set with Ray Data: its workers make the parts, the driver merges them.

The result is byte for byte that of `counterfoil features` in one process. The output folder must be
on a file system that all machines of the Ray cluster share. A part that was interrupted continues
when the program is started again.

    pip install "ray[data]"
    python examples/ray_features.py photos/captions.csv features --parts 16 --workers 4
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import ray

from counterfoil.core.parts import Part
from counterfoil.data import Pairs, load_pairs
from counterfoil.features.build import FeatureReport, build_features, default_backbone
from counterfoil.features.parts import extract_part


class PartMaker:
    """A Ray worker: it reads the table of the data set once, then extracts the parts it gets."""

    def __init__(self, source: str, out: str, backbone: str, options: dict[str, Any]) -> None:
        self.pairs: Pairs = load_pairs(source)
        self.out, self.backbone, self.options = out, backbone, options

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        reports = [
            extract_part(
                self.pairs,
                self.out,
                Part(int(number), int(total)),
                self.backbone,
                self.options,
                workers=1,
            )
            for number, total in zip(batch["number"], batch["total"], strict=True)
        ]
        return {
            "part": np.array([report.part.number for report in reports]),
            "images": np.array([report.images for report in reports]),
            "failed": np.array([report.failed for report in reports]),
        }


def extract(
    source: str,
    out: str,
    parts: int,
    workers: int,
    backbone: str | None = None,
    options: dict[str, Any] | None = None,
    gpus_per_worker: float = 0,
) -> FeatureReport:
    """Extract all parts with Ray Data, then merge them into the folder ``out``."""
    name, chosen = backbone or default_backbone(), options or {}
    location, target = os.path.abspath(source), os.path.abspath(out)
    numbers = [{"number": number + 1, "total": parts} for number in range(parts)]
    finished = ray.data.from_items(numbers).map_batches(
        PartMaker,
        fn_constructor_args=(location, target, name, chosen),
        batch_size=1,
        concurrency=workers,
        num_gpus=gpus_per_worker or None,
    )
    for row in finished.iter_rows():
        print(f"part {row['part']}: {row['images']} images, {row['failed']} failed", flush=True)
    pairs = load_pairs(location)
    return build_features(pairs, Path(target), name, chosen, cache_dir=None, merge=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="data set: the path of a table or folder")
    parser.add_argument("out", help="folder to write, on a shared file system")
    parser.add_argument("--parts", type=int, default=16, help="number of parts")
    parser.add_argument("--workers", type=int, default=2, help="Ray workers at the same time")
    parser.add_argument("--backbone", default=None, help="feature extractor")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per worker")
    given = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    report = extract(
        given.source, given.out, given.parts, given.workers, given.backbone, None, given.gpus
    )
    images = {name: split["images"] for name, split in report.manifest["splits"].items()}
    print(f"{report.written.target}: {images}, {len(report.failed)} failed")


if __name__ == "__main__":
    main()
