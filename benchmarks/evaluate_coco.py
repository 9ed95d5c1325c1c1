"""COCO-5K end to end: from a saved model and features on disk to both tables of recalls.

    python benchmarks/evaluate_coco.py --folder coco-shape --device cuda
    python benchmarks/evaluate_coco.py --folder small --images 100 --embed 64 --folds 5

Writes, once, random features in SCAN's layout (5,000 images, 36 × 2048 in half precision, five
captions each) and a saved, untrained NAAF model. Then does what `counterfoil evaluate RUN --data
FOLDER --split testall` does, by the same functions: reads the data set, loads the model, encodes
images and captions, scores all pairs, and computes the metrics with their intervals, both as the
mean over five folds (1K) and whole (5K). Prints the seconds of each stage and of all together,
Python's imports not counted, for some times in a row: the first starts the GPU's libraries and
compiles kernels (Triton keeps them on disk), the others are what an evaluation takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from _feature_folder import write_split

from counterfoil.core.config import build_config
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.load import load_pairs
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.evaluation.report import markdown_table
from counterfoil.models import create_model
from counterfoil.models.store import save_pretrained
from counterfoil.scoring.encode import score_split
from counterfoil.training.run_data import data_for_run
from counterfoil.training.run_folder import load_model

SPLIT = "testall"

T = TypeVar("T")


class Stages:
    """Seconds of each stage, one after the other; a `Progress`, to see where one ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.since = time.perf_counter()

    def end(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] = now - self.since
        self.since = now

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        yield from items
        self.end(description.split(" (")[0])

    def note(self, text: str) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


def prepare(options: argparse.Namespace) -> tuple[Path, Path]:
    """The data set and the model, each made where it is not there."""
    data, run = options.folder / "data", options.folder / f"naaf-{options.embed}"
    write_split(data, SPLIT, options.images, options.regions, options.dim)
    if not run.exists():
        split = load_pairs(str(data), "scan")[SPLIT]
        config = build_config(
            {"model": {"name": "naaf", "embed_size": options.embed}, "data": {"min_count": 1}}
        )
        torch.manual_seed(0)
        save_pretrained(create_model(config.model, split, config.data), run)
    return data, run


def evaluate_once(data: Path, run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by stage, and both RSUMs."""
    stages = Stages(choose_device(options.device))
    split = data_for_run(run, str(data), None, {}, options.folder / "cache", stages)[SPLIT]
    stages.end("reading data")
    model = load_model(run, options.device)
    stages.end("loading the model")
    scores = score_split(model, split, progress=stages)
    stages.end("putting together")
    folds = report_scores([scores], SPLIT, folds=options.folds, bootstrap=options.bootstrap)
    stages.end("metrics, folds")
    whole = report_scores([scores], SPLIT, bootstrap=options.bootstrap)
    stages.end("metrics, whole")
    return {"seconds": stages.seconds, "rsum_folds": folds.rsum, "rsum": whole.rsum}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--embed", type=int, default=1024)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--bootstrap", type=int, default=1000, help="as the command has it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data, run = prepare(options)
    found = []
    for number in range(options.times):
        print(f"evaluation {number + 1} …", file=sys.stderr)
        found.append(evaluate_once(data, run, options))
    device = choose_device(options.device)
    if options.json:
        print(json.dumps({"device": str(device), "evaluations": found}))
        return 0
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}; {options.images} images, {5 * options.images} captions\n")
    header = ("stage", *(f"{number + 1}. s" for number in range(len(found))))
    rows = [
        (stage, *(f"{one['seconds'][stage]:.2f}" for one in found)) for stage in found[0]["seconds"]
    ]
    rows.append(("all", *(f"{sum(one['seconds'].values()):.2f}" for one in found)))
    print("\n".join(markdown_table([header, *rows])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
