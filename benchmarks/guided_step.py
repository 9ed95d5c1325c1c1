"""What NDGL's guidance adds to a training step of CHAN.

    python benchmarks/guided_step.py --device cuda
    python benchmarks/guided_step.py --teachers 2 --batch 32 --embed 256

Trains chan (self-attention over regions, BiGRU) on random features with the hinge on the hardest
negative, and with `ndgl` beside it on a guide of the form `embeddings`, whose teachers are CHAN,
too. Plain and guided steps (forward, backward, clipping, AdamW) on the same batches take turns, so
that whatever else the machine does hits both alike; medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import counterfoil.objectives.ndgl  # noqa: F401 - registers 'ndgl'
from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.models import Model, create_model
from counterfoil.models.store import save_pretrained
from counterfoil.objectives import create_objective
from counterfoil.training.guides.build import build_guide
from counterfoil.training.optim import create_optimizer
from counterfoil.training.services import TrainingRunSetup
from counterfoil.training.step import TrainingStep

INPUT_DIM, WORDS, CLIP = 2048, 1000, 2.0


def make_split(folder: Path, images: int, regions: int) -> Split:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((images, regions, INPUT_DIM), dtype=np.float32)
    np.save(folder / "features.npy", features.astype(np.float16))
    words = np.array([f"word{number}" for number in range(WORDS)])
    captions = [
        [" ".join(rng.choice(words, rng.integers(6, 18))) for _ in range(5)] for _ in range(images)
    ]
    table = FragmentTable(ArrayFile(folder / "features.npy"), np.arange(images))
    return Split("train", [str(i) for i in range(images)], captions, fragments=table)


def some_batches(split: Split, model: Model, size: int, count: int) -> list[PairBatch]:
    items = CaptionItems(split, model.text, Augmentation(), 0)
    batches = []
    for epoch in range(count):
        indices = next(iter(RankBatches(BatchPlan(split, size, 0), epoch)))
        batches.append(Collate(model.text.pad)([items[index] for index in indices]))
    return [batch for batch in batches if isinstance(batch, PairBatch)]


def step_of(
    model: Model, split: Split, objective: dict[str, object], device: torch.device
) -> Callable[[PairBatch], None]:
    """A whole training step with an objective."""
    config = build_config({"model": {"name": "chan"}})
    whole = create_objective(objective)
    whole.prepare(TrainingRunSetup(split, model, config, device, Silent()))
    module = TrainingStep(model, whole, None).to(device).train()
    optimizer = create_optimizer(module, config.train.optimizer)

    def step(batch: PairBatch) -> None:
        loss, _ = module(batch, 0, 0, logging=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[PairBatch], None], batch: PairBatch, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--embed", type=int, default=1024)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--teachers", type=int, default=1)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = choose_device(options.device)
    config = build_config(
        {"model": {"name": "chan", "embed_size": options.embed}, "data": {"min_count": 1}}
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        split = make_split(folder, options.images, options.regions)
        runs = [folder / f"teacher-{number}" for number in range(options.teachers)]
        for number, run in enumerate(runs):
            torch.manual_seed(number)
            save_pretrained(create_model(config.model, split, config.data), run)
        build_guide(folder / "guide", runs, split, form="embeddings", device=device)
        model = create_model(config.model, split, config.data).to(device)
        batches = some_batches(split, model, options.batch, 4)
        guided = {"hardest": {}, "ndgl": {"guide": str(folder / "guide")}}
        steps = {
            "plain": step_of(model, split, {"hardest": {}}, device),
            "guided": step_of(model, split, guided, device),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(options.steps + 2):  # the first two warm up
            batch = batches[number % len(batches)].to(device)
            for name, step in steps.items():
                taken = seconds(step, batch, device)
                if number >= 2:
                    times[name].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "device": str(device),
        "teachers": options.teachers,
        **{f"{name}_ms": round(1000 * value, 2) for name, value in medians.items()},
        "ratio": round(medians["guided"] / medians["plain"], 3),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{device}, batch {options.batch}, embed {options.embed}, {options.teachers} "
            f"teacher(s): plain {result['plain_ms']} ms, guided {result['guided_ms']} ms, "
            f"ratio {result['ratio']}"
        )


if __name__ == "__main__":
    main()
