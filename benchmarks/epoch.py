"""A training epoch at Flickr30K's shape, everything included, through the training loop itself.

    python benchmarks/epoch.py --folder f30k-shape data.workers=8
    python benchmarks/epoch.py --folder small --images 256 --dev 32 --embed 128

Writes random features in SCAN's layout (29,000 images, 36 × 2048 in half precision: 4.3 GB) and
five captions an image into ``--folder``, once; then trains for some epochs by the recipe
`f30k/naaf` (or ``--recipe``, with any overrides): reading, collating, transfer, forward, backward,
clipping, the optimiser's step and logging are the loop's own. Prints, for each epoch, its seconds,
how many captions and steps a second, how long the loop waited for data and how long it was busy,
and, apart from that, what validation and saving took, and copying all features to a GPU, which
happens once a run (`data.features_on_gpu=false`: never, and every batch travels). The first epoch
also starts the GPU's libraries and compiles kernels; the last one counts.

``--profile N`` shows where N steps of the last epoch spend their time, on a GPU also by the host's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from _feature_folder import write_split
from torch.profiler import ProfilerActivity, profile

from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.batches.device_features import COPY_TASK
from counterfoil.evaluation.report import markdown_table
from counterfoil.models import create_model
from counterfoil.training.run_data import read_data
from counterfoil.training.trainer import Trainer

SETTLED = 20
"""Steps before the profiler looks."""

T = TypeVar("T")


@dataclass
class Epoch:
    """Seconds of an epoch: of its steps, of these waiting for batches, and of what comes after."""

    steps: int
    seconds: float
    waited: float
    after: float = 0.0


class Meter:
    """A `Progress` that times the loop that it is given to."""

    def __init__(self, device: torch.device, profiled: int = 0) -> None:
        self.device, self.profiled = device, profiled
        self.epochs: list[Epoch] = []
        self.ended = 0.0
        self.copied = 0.0
        self.table = ""

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        if not description.startswith("epoch"):
            begun = time.perf_counter()
            yield from items
            if description == COPY_TASK:
                self.copied = time.perf_counter() - begun
            return
        self.close()
        number, last = (int(part) for part in description.split()[-1].split("/"))
        look = self.profiled if number == last else 0
        started, waited, steps = time.perf_counter(), 0.0, 0
        profiler = None
        source = iter(items)
        while True:
            before = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                break
            waited += time.perf_counter() - before
            if look and steps == SETTLED:
                profiler = profile(activities=activities(self.device))
                profiler.start()
            yield item
            steps += 1
            if profiler is not None and steps == SETTLED + look:
                profiler.stop()
                orders = ["device", "cpu"] if self.device.type == "cuda" else ["cpu"]
                averages = profiler.key_averages()
                self.table = "\n".join(
                    averages.table(f"self_{by}_time_total", row_limit=30) for by in orders
                )
                profiler = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ended = time.perf_counter()
        self.epochs.append(Epoch(steps, self.ended - started, waited))

    def close(self) -> None:
        """The time since the last epoch's steps is what came after them."""
        if self.epochs:
            self.epochs[-1].after = time.perf_counter() - self.ended

    def note(self, text: str) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


def activities(device: torch.device) -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    return [*found, ProfilerActivity.CUDA] if device.type == "cuda" else found


def run(options: argparse.Namespace) -> tuple[Meter, RunConfig]:
    for split, count in (("train", options.images), ("dev", options.dev)):
        print(f"features: {split} …", file=sys.stderr)
        write_split(options.folder / "data", split, count, options.regions, options.dim)
    config = load_config(
        options.recipe,
        [
            f"data.source={options.folder / 'data'}",
            f"train.epochs={options.epochs}",
            f"train.device={options.device}",
            f"model.embed_size={options.embed}",
            *options.overrides,
        ],
    )
    device = choose_device(config.train.device)
    meter = Meter(device, options.profile)
    started = time.perf_counter()
    pairs = read_data(config, options.folder / "cache", meter)
    torch.manual_seed(config.seed)
    model = create_model(config.model, pairs.train, config.data)
    folder = options.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    trainer = Trainer(model, pairs, config, folder, meter)
    print(f"data and model: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    trainer.run()
    meter.close()
    return meter, config


def shown(number: int, epoch: Epoch, batch: int) -> tuple[str, ...]:
    return (
        str(number + 1),
        f"{epoch.seconds:.2f}",
        f"{epoch.steps * batch / epoch.seconds:,.0f}",
        f"{1e3 * epoch.seconds / epoch.steps:.2f}",
        f"{1e3 * epoch.waited / epoch.steps:.2f}",
        f"{1e3 * (epoch.seconds - epoch.waited) / epoch.steps:.2f}",
        f"{epoch.after:.2f}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("overrides", nargs="*", help="changes to the recipe: train.precision=bf16")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=29_000)
    parser.add_argument("--dev", type=int, default=1000)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--embed", type=int, default=1024)
    parser.add_argument("--recipe", default="f30k/naaf")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    meter, config = run(options)
    batch = config.train.batch_size
    if options.json:
        result: dict[str, Any] = {"device": str(meter.device), "batch": batch}
        result |= {"features_to_device_s": meter.copied}
        print(json.dumps({**result, "epochs": [vars(epoch) for epoch in meter.epochs]}))
        return 0
    name = torch.cuda.get_device_name() if meter.device.type == "cuda" else "cpu"
    print(
        f"{name}; {options.recipe}, {options.images} images with 5 captions each, batch {batch}, "
        f"{config.train.precision}, {config.data.workers} workers"
    )
    if meter.copied:
        print(f"before the first epoch, all features to the device: {meter.copied:.1f} s")
    print()
    header = ("epoch", "s", "captions/s", "ms a step", "waiting", "busy", "validating, saving s")
    rows = [shown(number, epoch, batch) for number, epoch in enumerate(meter.epochs)]
    print("\n".join(markdown_table([header, *rows])))
    if meter.table:
        print("\n" + meter.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
