"""Scores of a training batch: all pairs at once, against one caption after the other.

    python benchmarks/caption_by_caption.py --batch 128 --regions 36 --dim 1024

The public implementations of SCAN and NAAF score a batch in a Python loop over captions and build a
context vector for every word of every pair. `_caption_by_caption.py` does the same, in words of our
own. Each variant runs forward and backward in a process of its own, so that its peak memory is
its own; both must give the same scores. Prints the least seconds of all rounds, their ratio, and
peak memory.

``--loss hardest`` (the default) is the loss these methods train with, the hinge on hardest
negatives: it gives a gradient to few pairs, and the tiles' backward pass looks at these alone.
``--loss sum`` gives one to every pair.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from _caption_by_caption import BOUNDARY, naive_naaf, naive_scan_t2i
from torch import Tensor

from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.matchers import Matcher, Observation, matchers
from counterfoil.objectives import create_objective


def make_batch(options: argparse.Namespace) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(0)
    images = l2_normalize(
        torch.randn(options.batch, options.regions, options.dim, generator=generator)
    )
    lengths = (10 + torch.randint(0, 8, (options.batch,), generator=generator)).tolist()
    words = torch.randn(options.batch, max(lengths), options.dim, generator=generator)
    near = images.repeat(1, -(-max(lengths) // options.regions), 1)[:, : max(lengths)]
    return images, l2_normalize(near + 0.02 * options.dim**0.5 * words / 4), lengths


def run(variant: str, options: argparse.Namespace) -> dict[str, object]:
    method, how = variant.split("-")
    images, captions, lengths = make_batch(options)
    images.requires_grad_()
    captions.requires_grad_()
    if how == "loop":
        score = naive_scan_t2i if method == "scan" else naive_naaf
        call = lambda: score(images, captions, lengths)  # noqa: E731
    else:
        mask = torch.arange(captions.shape[1])[None] < torch.tensor(lengths)[:, None]
        regions = torch.ones(images.shape[:2], dtype=torch.bool)
        name, setting = ("scan-t2i", {}) if method == "scan" else ("naaf", {"boundary": BOUNDARY})
        matcher = matchers[name](options.dim, **setting).train()
        sides = Encoded(images, regions), Encoded(captions, mask)
        call = lambda: watched(matcher, *sides)  # noqa: E731
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(2 if how == "loop" else options.repeat):
        images.grad = captions.grad = None
        started = time.perf_counter()
        scores = call()
        loss_of(scores, options.loss).backward()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert images.grad is not None
    return {
        "seconds": min(seconds),
        "peak_mb": peak / 1024,
        "grew_mb": (peak - before) / 1024,
        "checksum": float(scores.detach().double().sum()),
        "gradient": float(images.grad.double().abs().sum()),
    }


def loss_of(scores: Tensor, name: str) -> Tensor:
    if name == "sum":
        return scores.sum()
    positives = torch.eye(len(scores), dtype=torch.bool)
    loss: Tensor = create_objective("hardest")(scores, positives)
    return loss


def watched(matcher: Matcher, images: Encoded, texts: Encoded) -> Tensor:
    """Scores, and what the matcher learns by watching (NAAF's boundary), as in a training step."""
    scores: Tensor = matcher(images, texts)
    eye = torch.eye(len(scores), dtype=torch.bool)
    held = {key: value.clone() for key, value in matcher.state_dict().items()}
    matcher.observe(Observation(images, texts, scores.detach(), eye, 0, 0))
    matcher.load_state_dict(held)  # the boundary stays, so that repetitions can be compared
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--loss", choices=["hardest", "sum"], default="hardest")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(run(options.variant, options)))
        return 0
    results: dict[str, dict[str, float]] = {}
    for number in range(options.rounds):  # in turn, so that a busy moment does not hit one alone
        for variant in ("scan-loop", "scan-tiles", "naaf-loop", "naaf-tiles"):
            print(f"round {number + 1}: {variant} …", file=sys.stderr)
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--variant", variant],
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout)
            if variant not in results or found["seconds"] < results[variant]["seconds"]:
                results[variant] = found
    for method in ("scan", "naaf"):
        loop, tiles = results[f"{method}-loop"], results[f"{method}-tiles"]
        tiles["ratio"] = loop["seconds"] / tiles["seconds"]
        apart = abs(loop["checksum"] - tiles["checksum"]) / max(1.0, abs(loop["checksum"]))
        slopes = abs(loop["gradient"] - tiles["gradient"]) / max(1e-9, loop["gradient"])
        if not options.json:
            print(
                f"{method}: caption by caption {loop['seconds']:.2f} s, {loop['grew_mb']:.0f} MB; "
                f"tiles {tiles['seconds']:.3f} s, {tiles['grew_mb']:.0f} MB; "
                f"{tiles['ratio']:.1f} times faster; scores differ by {apart:.1e}, "
                f"gradients by {slopes:.1e}"
            )
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
