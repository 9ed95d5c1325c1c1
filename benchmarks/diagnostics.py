"""What the diagnostics of a batch cost, as a share of training.

    python benchmarks/diagnostics.py --batch 128 --embed 1024 --regions 36

Trains vse-mlp (projection, bottleneck MLP, GPO; BiGRU) on random features with the hinge on the
hardest negative. Whole steps (forward, backward, clipping, AdamW) without and with logging take
turns with each diagnostic by itself on the scores and embeddings of the same batch, its numbers
read back as a log line does, so that whatever else the machine does hits all alike; medians are
printed. The share of training is given for one logged step in ``--log-every``: of the three
diagnostics as timed by themselves, and of all that a logged step takes longer than a plain one,
which on a CPU is less certain than it is small. Runs on the CPU and, where there is one, on CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from counterfoil.core.config import ModelConfig, OptimizerConfig
from counterfoil.data.batches.collate import ImageBatch, PairBatch, TextBatch
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.matchers.base import pooled
from counterfoil.models import Model, resolve
from counterfoil.objectives import both_directions, create_objective
from counterfoil.training.diagnostics import (
    margin_histogram,
    score_diagnostics,
    tangential_gradients,
)
from counterfoil.training.optim import create_optimizer
from counterfoil.training.step import TrainingStep

INPUT_DIM, WORDS, CLIP = 2048, 1000, 2.0
PLAIN, LOGGED = "step", "logged step"


def create(embed: int) -> Model:
    words = Vocabulary.build([f"word{number}" for number in range(WORDS)], 1)
    spec = resolve(ModelConfig(name="vse-mlp", embed_size=embed))
    return Model(spec, INPUT_DIM, WordText(words))


def random_batch(batch: int, regions: int, length: int) -> PairBatch:
    generator = torch.Generator().manual_seed(0)
    images = ImageBatch(
        torch.randn(batch, regions, INPUT_DIM, generator=generator),
        torch.ones(batch, regions, dtype=torch.bool),
    )
    texts = TextBatch(
        torch.randint(4, WORDS, (batch, length), generator=generator),
        torch.ones(batch, length, dtype=torch.bool),
    )
    own = torch.arange(batch)
    return PairBatch(images, texts, image_ids=own, caption_ids=own, owners=own)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def read_back(numbers: dict[str, Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in numbers.items()}


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step and of each diagnostic."""
    torch.manual_seed(0)
    model = create(options.embed)
    step = TrainingStep(model, create_objective("hardest"), None).to(device).train()
    optimizer = create_optimizer(step, OptimizerConfig())
    batch = random_batch(options.batch, options.regions, options.length).to(device)

    def train(logging: bool) -> float:
        loss, diagnostics = step(batch, 0, 0, logging)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for value in diagnostics.values():
            value.tolist()
        return float(loss.detach())

    with torch.no_grad():
        images = pooled(model.encode_images(batch.images), "image")
        texts = pooled(model.encode_texts(batch.texts), "text")
    positives = torch.eye(options.batch, dtype=torch.bool, device=device)
    directions = both_directions(images @ texts.T, positives)
    timed: dict[str, Callable[[], object]] = {
        PLAIN: lambda: train(False),
        LOGGED: lambda: train(True),
        "score_diagnostics": lambda: read_back(score_diagnostics(directions)),
        "tangential_gradients": lambda: read_back(tangential_gradients(images, texts, positives)),
        "margin_histogram": lambda: margin_histogram(directions).tolist(),
    }
    found: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(options.repeats + options.warmup):
        for name, work in timed.items():
            spent = seconds(work, device)
            if repeat >= options.warmup:
                found[name].append(spent)
    return {name: statistics.median(several) for name, several in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--embed", type=int, default=1024)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--length", type=int, default=14, help="words of a caption")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], nargs="*", help="default: all there are"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for name in options.device or present:
        found = measure(torch.device(name), options)
        step, logged = found.pop(PLAIN), found.pop(LOGGED)
        each = {key: value / step for key, value in found.items()}
        share = sum(each.values()) / options.log_every
        longer = (logged / step - 1) / options.log_every
        if options.json:
            result = {"device": name, "step_ms": step * 1e3, **each}
            print(json.dumps({**result, "share": share, "share_of_logging": longer}))
            continue
        print(f"{name}: step {step * 1e3:.2f} ms, logged step {logged * 1e3:.2f} ms")
        for key, ratio in each.items():
            print(f"  {key:<22}{found[key] * 1e3:10.3f} ms {ratio:9.3%} of a step")
        print(
            f"  one step in {options.log_every} logged: diagnostics take {share:.3%} of training, "
            f"logging as a whole {longer:+.3%}"
        )


if __name__ == "__main__":
    main()
