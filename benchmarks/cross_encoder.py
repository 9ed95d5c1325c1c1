"""How much of a GPU a cross-encoder uses, scoring all pairs and training.

    python benchmarks/cross_encoder.py                  # in small, on a CPU: does it run?
    python benchmarks/cross_encoder.py --device cuda    # UNITER-base, 200 images, 1,000 captions

Builds UNITER from nothing (12 layers of 768 numbers, 30,522 words) and random data: 36 regions of
2,048 numbers with boxes, captions of 6 to 30 words, about 13.5 on average. One run measures a large
matrix product; every image with every caption by what `counterfoil evaluate` calls; and whole
training steps (forward, backward, clipping, AdamW) of the recipes `f30k/uniter-base` (all pairs of
a batch) and `f30k/tags-base` (hard candidates and TAGS). The best of the products is the ceiling,
the median of the rounds what we take.

The share of the ceiling is of the operations that the scores and losses need (`_transformer_work`):
2 · weights · tokens and 4 · L · D of attention per token and layer, three times that with
gradients; padding and what is computed again in the backward pass do not count. Of the last layer
only the first token is needed for a score: "needed" counts it so, "whole" as if it were all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _transformer_work import Work
from score_all import caption_lengths

from counterfoil.core.config import RunConfig, build_config, merge, read_recipe
from counterfoil.core.progress import Silent
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.tensors.device import choose_device
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.data.text.vocabulary import SPECIALS, Vocabulary
from counterfoil.kernels import packed_attention
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models import Model, create_model
from counterfoil.objectives import create_objective
from counterfoil.scoring.encode import encode_images, encode_texts, score_split
from counterfoil.training.optim import create_optimizer
from counterfoil.training.services import TrainingRunSetup
from counterfoil.training.step import PRECISIONS, TrainingStep

TRAINED = {"itm": "f30k/uniter-base", "tags": "f30k/tags-base"}
INPUT_DIM, VOCABULARY, CAPTIONS = 2048, 30_522, 5
SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the square product that measures a device."""

SLOTS = (
    "a the",
    "young old small red brown wet",
    "man woman dog girl ball tree",
    "holds watches near behind",
)
"""Captions go round these, so that the scene graphs TAGS masks by are those of sentences."""

SMALL: dict[str, dict[str, Any]] = {
    "itm": {"objective": {"triplet": {}}, "train": {"batch_size": 4}},
    "tags": {
        "objective": {
            "hard-candidates": {"anchors": 2, "kept": 3},
            "tags": {"anchors": 2, "masks": 2, "samples": 2, "kept": 3},
        },
        "train": {"batch_size": 6},
    },
}
"""What a CPU is given instead, with a model of two layers."""


def make_split(folder: Path, images: int, regions: int) -> Split:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((images, regions, INPUT_DIM), dtype=np.float32)
    np.save(folder / "features.npy", features.astype(np.float16))
    corners = np.sort(rng.random((images, regions, 2, 2), dtype=np.float32), axis=2)
    np.save(folder / "boxes.npy", corners.reshape(images, regions, 4))
    lengths = caption_lengths(images * CAPTIONS, torch.Generator().manual_seed(0)).tolist()
    slots = [slot.split() for slot in SLOTS]
    texts = [
        " ".join(str(rng.choice(slots[place % len(slots)])) for place in range(length))
        for length in lengths
    ]
    captions = [texts[i : i + CAPTIONS] for i in range(0, len(texts), CAPTIONS)]
    table = FragmentTable(
        ArrayFile(folder / "features.npy"),
        np.arange(images),
        boxes=ArrayFile(folder / "boxes.npy"),
    )
    return Split("train", [str(i) for i in range(images)], captions, fragments=table)


def read(name: str, folder: Path, options: argparse.Namespace) -> RunConfig:
    """A recipe, from nothing instead of from BERT, and in small on a CPU."""
    tree = read_recipe(Path(TRAINED[name]))
    matcher = {**tree["model"]["matcher"], "pretrained": "", "layers": options.layers}
    if options.checkpointing != "recipe":
        matcher["checkpointing"] = options.checkpointing == "on"
    change = {
        "model": {"embed_size": options.embed, "matcher": matcher},
        "data": {"vocabulary": str(folder / "words.json")},
    }
    tree = merge(tree, merge(change, SMALL[name] if options.device.type == "cpu" else {}))
    tree["model"]["text"] = {"name": "uniter"}
    return build_config(tree, name)


def make_model(config: RunConfig, split: Split, device: torch.device) -> Model:
    torch.manual_seed(0)
    return create_model(config.model, split, config.data).to(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of one matrix product, the best of ten after three."""
    side = SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = [seconds(lambda: a @ b, device) for _ in range(13)]
    return 2 * side**3 / min(times[3:])


def rates(work: Work, taken: float) -> dict[str, float]:
    return {
        "pairs_per_second": work.sequences() / taken,
        "tokens_per_pair": work.tokens() / work.sequences(),
        "needed_flops_per_second": work.needed / taken,
        "whole_flops_per_second": work.whole / taken,
    }


def median_of(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def measure_scoring(model: Model, split: Split, rounds: int) -> list[dict[str, float]]:
    """Every image with every caption, from reading features to scores in the host's memory."""
    work, found = work_of(model), []
    for _ in range(rounds + 1):
        with work.counted():
            taken = seconds(lambda: score_split(model, split), model.device)
            found.append({**rates(work, taken), "seconds": taken})
    return found[1:]  # the first warms up


@torch.inference_mode()
def compare_precision(model: Model, split: Split) -> dict[str, float]:
    """Scores in bfloat16 against those in single precision, of new weights, which are much alike.

    ``apart`` is the largest difference, ``spread`` the standard deviation of the scores.
    """
    with eval_mode(model):
        images = encode_images(model, split)[0][slice(0, 8)]
        texts = encode_texts(model, split.texts[:32])
        full = model.matcher(images, texts)
        sides = [replace(one, fragments=one.fragments.bfloat16()) for one in (images, texts)]
        rough = model.matcher(*sides)
    both = torch.stack([full.flatten(), rough.flatten()])
    return {
        "pairs": full.numel(),
        "apart": float((full - rough).abs().max()),
        "spread": float(full.std()),
        "correlation": float(torch.corrcoef(both)[0, 1]),
    }


def measure_training(model: Model, split: Split, config: RunConfig, steps: int) -> list[Any]:
    """Whole steps over batches that are already there."""
    device, train = model.device, config.train
    objective = create_objective(config.objective)
    objective.prepare(TrainingRunSetup(split, model, config, device, Silent()))
    module = TrainingStep(model, objective, PRECISIONS[train.precision]).to(device).train()
    optimizer = create_optimizer(module, train.optimizer)
    work, found = work_of(model), []

    def step(batch: PairBatch, number: int) -> None:
        loss, _ = module(batch, 0, number, logging=False)
        with work.backward():
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), train.optimizer.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for number, batch in enumerate(some_batches(split, model, train.batch_size, steps + 2)):
        moved = batch.to(device)
        with work.counted():
            taken = seconds(lambda b=moved, n=number: step(b, n), device)
            found.append(
                {
                    **rates(work, taken),
                    "learned_pairs_per_second": work.sequences(with_gradients=True) / taken,
                    "batch_pairs_per_second": len(moved.owners) / taken,
                    "seconds": taken,
                }
            )
    return found[2:]  # the first two warm up


def some_batches(split: Split, model: Model, size: int, count: int) -> list[PairBatch]:
    items = CaptionItems(split, model.text, Augmentation(), 0)
    batches = []
    for epoch in range(count):
        indices = next(iter(RankBatches(BatchPlan(split, size, 0), epoch)))
        batches.append(Collate(model.text.pad)([items[index] for index in indices]))
    return [batch for batch in batches if isinstance(batch, PairBatch)]


def work_of(model: Model) -> Work:
    assert isinstance(model.matcher, CrossEncoder)
    return Work(model.matcher)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = options.device
    split = make_split(folder, options.images, options.regions)
    fillers = [f"piece{number}" for number in range(VOCABULARY)]
    known = [word for slot in SLOTS for word in slot.split()]
    Vocabulary([*SPECIALS, *known, *fillers][:VOCABULARY]).save(folder / "words.json")
    found: dict[str, dict[str, float]] = {}
    model = make_model(read("itm", folder, options), split, device)
    dtype = torch.bfloat16 if work_of(model).matcher.rounds(device) else torch.float32
    products = [product_rate(device, dtype)]
    print("scoring …", file=sys.stderr)
    found["scoring"] = median_of(measure_scoring(model, split, options.rounds))
    products.append(product_rate(device, dtype))
    precision = compare_precision(model, split)
    del model
    for name in options.train:
        print(f"training {name} …", file=sys.stderr)
        config = read(name, folder, options)
        learner = make_model(config, split, device)
        found[name] = median_of(measure_training(learner, split, config, options.steps))
        del learner
    products.append(product_rate(device, dtype))
    ceiling = max(products)
    for row in found.values():
        row["share"] = row["needed_flops_per_second"] / ceiling
        row["whole_share"] = row["whole_flops_per_second"] / ceiling
    return {
        "device": str(device),
        "dtype": str(dtype),
        "product": ceiling,
        "found": found,
        "bfloat16": precision,
    }


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    print(
        f"{result['device']}: product of {SIDE[options.device.type]}³ in {result['dtype']} at "
        f"{result['product'] / 1e12:,.2f} TFLOP/s; {options.layers} layers of {options.embed}, "
        f"{options.images} images of {options.regions} regions, {CAPTIONS * options.images} "
        "captions"
    )
    print("              pairs/s  tokens/pair  TFLOP/s needed  of product  whole  of product")
    for name, row in result["found"].items():
        print(
            f"{name:9s} {row['pairs_per_second']:11,.0f} {row['tokens_per_pair']:12.1f} "
            f"{row['needed_flops_per_second'] / 1e12:15,.2f} {row['share']:11.1%} "
            f"{row['whole_flops_per_second'] / 1e12:6,.2f} {row['whole_share']:11.1%}"
        )
    for name in options.train:
        row = result["found"][name]
        print(
            f"{name}: a step {row['seconds']:.3f} s; {row['learned_pairs_per_second']:,.0f} "
            f"pairs/s with gradients, {row['batch_pairs_per_second']:,.0f} captions/s of the batch"
        )
    near = result["bfloat16"]
    print(
        f"bfloat16 against float32, {near['pairs']} pairs: at most {near['apart']:.1e} apart where "
        f"the scores' spread is {near['spread']:.1e}; correlation {near['correlation']:.4f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", type=choose_device)
    parser.add_argument("--images", type=int, help="with 5 captions each; 200, on a CPU 8")
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--layers", type=int, help="12, on a CPU 2")
    parser.add_argument("--embed", type=int, help="768, on a CPU 128")
    parser.add_argument("--rounds", type=int, default=3, help="of scoring")
    parser.add_argument("--steps", type=int, help="of training; 8, on a CPU 1")
    parser.add_argument("--train", nargs="*", choices=list(TRAINED), default=list(TRAINED))
    parser.add_argument("--checkpointing", choices=["recipe", "on", "off"], default="recipe")
    parser.add_argument("--padded", action="store_true", help="attention by PyTorch throughout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.padded:
        packed_attention.LONGEST = 0
    small = options.device.type == "cpu"
    sizes = {"images": (8, 200), "layers": (2, 12), "embed": (128, 768), "steps": (1, 8)}
    for name, (little, much) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, little if small else much)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    if options.json:
        print(json.dumps(result))
    else:
        report(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
