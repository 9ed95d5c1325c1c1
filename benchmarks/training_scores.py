"""Training scores, forward and backward: fused kernels, vectorised PyTorch, caption by caption.

    python benchmarks/training_scores.py --device cuda --batch 128 256 1024
    python benchmarks/training_scores.py --batch 32 --dim 256 --steps 3

Scores of every image of a batch with every caption, then the gradient of both sides' fragments for
a gradient of every score (the hardest case: a hinge on hardest negatives gives one to few). Each
matcher does it as it does in training, by a fused kernel where there is one; in its eager form,
which is PyTorch alone; and, in batches of up to ``--loop-most``, in a loop over captions as the
public code has it (`_caption_by_caption.py`; NAAF with its mining). Times are medians over runs of
steps that follow one another, as in training; extra memory is the peak above what the fragments and
their gradients take. The first step, in which kernels are compiled or loaded, is not counted.

On a GPU each is done in single precision and under bfloat16 autocast. ``--methods all`` adds the
matchers that have no kernel for training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _caption_by_caption import (
    BOUNDARY,
    naive_bfan,
    naive_chan,
    naive_naaf,
    naive_scan_i2t,
    naive_scan_t2i,
)
from score_all import make_sides
from torch import Tensor

from counterfoil.core.tensors.host_mirror import attach_host_copy
from counterfoil.encoders import Encoded
from counterfoil.evaluation.report import markdown_table
from counterfoil.kernels.spec import usable
from counterfoil.kernels.triton.training import trainable
from counterfoil.matchers import Matcher, matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher

Naive = Callable[[Tensor, Tensor, list[int]], Tensor]

LOOPS: dict[str, Naive] = {
    "naaf": naive_naaf,
    "scan-t2i": naive_scan_t2i,
    "chan": naive_chan,
    "scan-i2t": naive_scan_i2t,
    "bfan": naive_bfan,
}
SETTINGS: dict[str, dict[str, float]] = {"naaf": {"boundary": BOUNDARY}}
FUSED = ("naaf", "scan-t2i", "scan-i2t", "chan", "bfan")
OTHERS = ("saf", "sgr", "imram", "gsmn")

TOGETHER = {"cuda": 5, "cpu": 1}
"""Steps of a run of them: on a GPU, the host does not wait in between."""

MOST_SECONDS = 4.0
"""After which no more steps are taken, however many were asked for."""


class Batch:
    """A batch whose fragments want gradients, and a gradient for each of its scores."""

    def __init__(self, size: int, options: argparse.Namespace) -> None:
        made = argparse.Namespace(**{**vars(options), "images": size, "captions": size})
        images, texts = make_sides(made, torch.float32)
        # as in training, where masks are made on the host and then moved
        self.masks = [attach_host_copy(side.mask, side.mask.cpu()) for side in (images, texts)]
        self.lengths = texts.mask.sum(1).tolist()
        assert images.fragments is not None
        assert texts.fragments is not None
        self.regions = images.fragments.requires_grad_()
        self.words = texts.fragments.requires_grad_()
        generator = torch.Generator(options.device).manual_seed(1)
        self.gradient = torch.randn(size, size, generator=generator, device=options.device)

        corner = torch.rand(size, options.regions, 2, generator=generator, device=options.device)
        self.boxes = torch.cat([corner, 1 + corner], 2) / 2  # GSMN reads where regions are

    @property
    def sides(self) -> tuple[Encoded, Encoded]:
        images = Encoded(self.regions, self.masks[0], boxes=self.boxes)
        return images, Encoded(self.words, self.masks[1])


def forms(name: str, batch: Batch, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The ways to score a batch, by their names."""
    matcher: Matcher = matchers[name](options.dim, **SETTINGS.get(name, {})).train()
    matcher = matcher.to(options.device)
    kernels = (
        isinstance(matcher, CrossAttentionMatcher)
        and usable(batch.regions.device, torch.float32)
        and bool(matcher.kernel_specs())
        and all(trainable(spec) for spec in matcher.kernel_specs())
    )
    yield ("fused" if kernels else "eager"), lambda: matcher(*batch.sides)
    if kernels and isinstance(matcher, CrossAttentionMatcher):
        yield "eager", lambda: matcher.torch_scores(*batch.sides)
    if name in LOOPS and len(batch.lengths) <= options.loop_most:
        yield "loop", lambda: LOOPS[name](batch.regions, batch.words, batch.lengths)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    score: Callable[[], Tensor],
    batch: Batch,
    dtype: torch.dtype | None,
    steps: int,
    device: str,
) -> dict[str, float | None]:
    """Median milliseconds of a step, and bytes beyond fragments and gradients; None: no GPU."""

    def step() -> None:
        batch.regions.grad = batch.words.grad = None
        with torch.autocast(device, dtype, enabled=dtype is not None):
            scores = score()
        scores.backward(batch.gradient.to(scores.dtype))

    start = now(device)
    step()
    first = now(device) - start
    extra = None
    if device == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - held
    taken = []
    for _ in range(steps):
        start = now(device)
        for _ in range(TOGETHER[device]):
            step()
        taken.append((now(device) - start) / TOGETHER[device])
        if TOGETHER[device] * sum(taken) > MOST_SECONDS:
            break
    return {"ms": 1e3 * statistics.median(taken), "first_s": first, "extra_bytes": extra}


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    precisions: dict[str, torch.dtype | None] = {"float32": None}
    if options.device == "cuda":
        precisions["bf16"] = torch.bfloat16
    for size in options.batch:
        batch = Batch(size, options)
        for name in options.methods:
            for form, score in forms(name, batch, options):
                for precision, dtype in precisions.items():
                    if form == "loop" and dtype is not None:
                        continue  # the public code trains in single precision
                    print(f"{name}, batch {size}, {form}, {precision} …", file=sys.stderr)
                    steps = options.loop_steps if form == "loop" else options.steps
                    row = {"method": name, "batch": size, "form": form, "precision": precision}
                    try:
                        found = measure(score, batch, dtype, steps, options.device)
                    except torch.cuda.OutOfMemoryError:
                        found = {"ms": None, "first_s": None, "extra_bytes": None}
                        batch.regions.grad = batch.words.grad = None
                        torch.cuda.empty_cache()
                    yield row | found


def shown(row: dict[str, Any]) -> tuple[str, ...]:
    extra = "–" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e9:.2f}"
    if row["ms"] is None:
        times = ("out of memory", "–")
    else:
        times = f"{row['ms']:.2f}", f"{row['first_s']:.2f}"
    return row["method"], str(row["batch"]), row["form"], row["precision"], *times, extra


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument(
        "--methods", nargs="+", choices=[*FUSED, *OTHERS, "all"], default=list(FUSED)
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--loop-steps", type=int, default=3)
    parser.add_argument("--loop-most", type=int, default=128, help="largest batch for the loop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "all" in options.methods:
        options.methods = [*FUSED, *OTHERS]
    torch.set_num_threads(options.threads)
    rows = list(rows_of(options))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    if options.json:
        print(json.dumps({"device": name, "rows": rows}))
        return 0
    print(f"{name}; {options.regions} regions of {options.dim}; forward and backward\n")
    header = ("method", "batch", "form", "precision", "ms a step", "first s", "extra GB")
    print("\n".join(markdown_table([header, *map(shown, rows)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
