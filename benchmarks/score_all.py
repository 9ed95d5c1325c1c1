"""Every image with every caption: the scoring engine against one caption after the other.

    python benchmarks/score_all.py --images 256 --captions 256 --threads 2
    python benchmarks/score_all.py --images 5000 --captions 25000 --device cuda --dtype float16

One run measures the machine's own rates (a large matrix product, a copy), then for each method the
scoring engine and the form of the public code (`_caption_by_caption.py`), in turn for some rounds,
and takes the best of each. Of many captions the loop does ``--loop-captions``, spread over all
lengths, and its time is scaled up by their number. The share of the ceiling is what
2 · words · regions · D operations of all pairs, padding not counted, would take at the rate of the
matrix product, by the time that scoring took. Regions are random unit vectors, words are near
them; lengths are as of captions, 6 to 30 words and about 13.5 on average.

``--clock cpu`` counts the processor's time instead of the clock's, of all threads together: on a
machine with other work to do, waiting for a turn is then not counted, neither for us nor for the
product that we are measured against.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from _caption_by_caption import (
    BOUNDARY,
    naive_bfan,
    naive_chan,
    naive_naaf,
    naive_scan_i2t,
    naive_scan_t2i,
)
from torch import Tensor

from counterfoil.encoders import Encoded, l2_normalise
from counterfoil.evaluation.score_engine import score_matrix
from counterfoil.matchers import Matcher, matchers

Naive = Callable[[Tensor, Tensor, list[int]], Tensor]

METHODS: dict[str, tuple[str, dict[str, float], Naive]] = {
    "naaf": ("naaf", {"boundary": BOUNDARY}, partial(naive_naaf, inference=True)),
    "scan-t2i": ("scan-t2i", {}, naive_scan_t2i),
    "scan-i2t": ("scan-i2t", {}, naive_scan_i2t),
    "bfan": ("bfan", {}, naive_bfan),
    "chan": ("chan", {}, naive_chan),
}
PRODUCT = {"cpu": 2048, "cuda": 8192}
"""Side of the square product that measures a device."""


def caption_lengths(count: int, generator: torch.Generator) -> Tensor:
    """6 to 30 words, skewed to the short side, about 13.5 on average."""
    waits = -torch.rand(count, 4, generator=generator).clamp(min=1e-9).log()  # a gamma of shape 4
    return (6 + waits.sum(1) * 1.98).long().clamp(6, 30)


def make_sides(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Encoded, Encoded]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.images, options.regions, options.dim, generator=generator)
    lengths = caption_lengths(options.captions, generator)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    noise = torch.randn(*mask.shape, options.dim, generator=generator)
    # each word is near a region of its caption's image, so that attention has something to find
    owners = torch.arange(options.captions) % options.images
    places = torch.randint(options.regions, mask.shape, generator=generator)
    words = (l2_normalise(images)[owners[:, None], places] + 0.04 * noise) * mask[..., None]
    shown = torch.ones(images.shape[:2], dtype=torch.bool)
    sides = (
        Encoded(l2_normalise(images).to(dtype), shown),
        Encoded(l2_normalise(words).to(dtype), mask),
    )
    return sides[0].to(options.device), sides[1].to(options.device)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def product_rate(device: str, dtype: torch.dtype, tf32: bool = False) -> float:
    """Operations a second of one matrix product."""
    side = PRODUCT[device]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        best = min(seconds(lambda: a @ b, device) for _ in range(3))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    return 2 * side**3 / best


def copy_rate(device: str) -> float:
    """Bytes a second: memory to memory, or from a GPU to pinned memory."""
    source = torch.zeros(1 << 26, device=device)
    target = torch.empty(1 << 26, pin_memory=device == "cuda")
    best = min(seconds(lambda: target.copy_(source, non_blocking=True), device) for _ in range(3))
    return source.numel() * 4 / best


def rates(device: str) -> dict[str, float]:
    found = {"float32": product_rate(device, torch.float32)}
    if device == "cuda":
        found["tf32"] = product_rate(device, torch.float32, tf32=True)
        found["float16"] = product_rate(device, torch.float16)
        found["bfloat16"] = product_rate(device, torch.bfloat16)
    return {**found, "copy": copy_rate(device)}


def some_captions(texts: Encoded, count: int) -> tuple[Tensor, list[int]]:
    """Which captions the loop does, evenly over those sorted by length, and their lengths."""
    lengths = texts.mask.sum(1)
    order = lengths.argsort(stable=True)
    at = (
        torch.linspace(0, len(order) - 1, min(count, len(order)), device=order.device)
        .round()
        .long()
    )
    return order[at], lengths[order[at]].tolist()


def keep_best(best: dict[str, float], found: dict[str, float], pick: Callable[..., float]) -> None:
    for key, value in found.items():
        best[key] = pick(best[key], value) if key in best else value


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, object]:
    dtype = getattr(torch, options.dtype)
    images, texts = make_sides(options, dtype)
    assert images.fragments is not None
    assert texts.fragments is not None
    chosen, lengths = some_captions(texts, options.loop_captions)
    captions = texts.fragments[chosen]
    ceilings: dict[str, float] = {}
    times: dict[str, dict[str, float]] = {name: {} for name in options.methods}
    apart: dict[str, float] = {}
    for number in range(options.rounds):  # in turn, so that a busy moment does not hit one alone
        for name in options.methods:
            print(f"round {number + 1}: {name} …", file=sys.stderr)
            kind, settings, naive = METHODS[name]
            matcher: Matcher = matchers[kind](options.dim, **settings).eval().to(options.device)
            keep_best(ceilings, rates(options.device), max)
            scores = [torch.empty(0)]

            def engine(matcher: Matcher = matcher, scores: list[Tensor] = scores) -> None:
                scores[0] = score_matrix(matcher, images, texts)

            found = {"engine": min(seconds(engine, options.device) for _ in range(options.repeat))}
            if number < options.loop_rounds:
                looped: list[Tensor] = []

                def loop(naive: Naive = naive, looped: list[Tensor] = looped) -> None:
                    looped.append(naive(images.fragments, captions, lengths))  # type: ignore[arg-type]

                found["loop"] = seconds(loop, options.device) * len(texts) / len(chosen)
                mine = scores[0][:, chosen.cpu()]
                apart[name] = float((looped[-1].float().cpu() - mine).abs().max())
            keep_best(times[name], found, min)
    work = 2 * int(texts.mask.sum()) * images.mask.numel() * options.dim
    ceiling = ceilings["float32" if options.dtype == "float32" else options.dtype]
    pairs = len(images) * len(texts)
    return {
        "ceilings": ceilings,
        "pairs": pairs,
        "words": float(texts.mask.sum() / len(texts)),
        "looped": len(chosen),
        "methods": {
            name: {
                **taken,
                "pairs_per_second": pairs / taken["engine"],
                "ratio": taken["loop"] / taken["engine"],
                "share": work / taken["engine"] / ceiling,
                "apart": apart[name],
            }
            for name, taken in times.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--captions", type=int, default=256)
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--loop-rounds", type=int, default=1, help="rounds that do the loop, too")
    parser.add_argument("--loop-captions", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(options.threads)
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return 0
    ceilings = {k: v for k, v in result["ceilings"].items() if k != "copy"}  # type: ignore[attr-defined]
    rates_said = ", ".join(f"{k} {v / 1e9:,.0f} GFLOP/s" for k, v in ceilings.items())
    print(f"matrix product: {rates_said}; copy {result['ceilings']['copy'] / 1e9:.1f} GB/s")  # type: ignore[index]
    print(
        f"{options.images} images, {options.captions} captions of {result['words']:.1f} words; "
        f"{options.threads} threads, {options.clock} time"
    )
    print("method     engine s  pairs/s       loop s   ratio  of ceiling  differ by")
    for name, row in result["methods"].items():  # type: ignore[attr-defined]
        print(
            f"{name:9s} {row['engine']:9.3f} {row['pairs_per_second']:9,.0f} {row['loop']:12.2f} "
            f"{row['ratio']:7.1f} {row['share']:11.0%}  {row['apart']:.1e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
