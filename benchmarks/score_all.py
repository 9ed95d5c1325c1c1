"""Every image with every caption: the scoring engine against one caption after the other.

    python benchmarks/score_all.py --images 256 --captions 256 --threads 2
    python benchmarks/score_all.py --images 5000 --captions 25000 --device cuda

One run measures the machine's own rates (a large matrix product, a copy), then for each method the
scoring engine and the form of the public code (`_caption_by_caption.py`), in turn for some rounds,
and takes the best of each. Of many captions the loop does ``--loop-captions``, spread over all
lengths, and its time is scaled up by their number. It works in single precision and, on a CPU, in
double, too, where public code does (it keeps what it encoded as NumPy's default type). The engine's
first call, in which a GPU's kernels are compiled or loaded, is timed apart. *engine* ends
with all scores on the device that computed them, *on host* with the matrix in the host's memory.
Regions are random unit vectors, words are near them; lengths are as of captions, 6 to 30 words and
about 13.5 on average.

The second table is a roofline. *floor* is what 2 · words · regions · D operations of all pairs,
padding not counted, take at the rate of the large product, in the precision in which the engine
multiplies (on a GPU single precision is rounded to half); *product* is that product alone, done in
as large pieces as the engine does it, its results thrown away; *share* is floor by engine.

Errors are against the eager form in double precision of the same fragments, over ``--check`` images
and captions: the largest, and the share of scores that are off by more than 0.002.

``--clock cpu`` counts the processor's time instead of the clock's, of all threads together: on a
machine with other work to do, waiting for a turn is then not counted, neither for us nor for the
product that we are measured against. Threads that wait for one another are not busy at it
(``OMP_WAIT_POLICY``), as in the `counterfoil` command: else they would be counted, too, and keep
cores from those that work.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch reads it

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

from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.evaluation.report import markdown_table
from counterfoil.kernels.triton.launch import BUFFER
from counterfoil.matchers import Matcher, matchers
from counterfoil.matchers.fragment_matcher import BLOCK_CELLS, CrossAttentionMatcher
from counterfoil.scoring.engine import by_kernels, for_kernels, score_matrix, score_on_device
from counterfoil.scoring.plan import plan_for_kernels, plan_scores

Naive = Callable[[Tensor, Tensor, list[int]], Tensor]

DOUBLE = {"naaf", "scan-t2i", "scan-i2t", "bfan"}
"""Methods whose public code keeps what it encoded in double precision, and so scores in it."""

METHODS: dict[str, tuple[str, dict[str, float], Naive]] = {
    "naaf": ("naaf", {"boundary": BOUNDARY}, partial(naive_naaf, inference=True)),
    "scan-t2i": ("scan-t2i", {}, naive_scan_t2i),
    "scan-i2t": ("scan-i2t", {}, naive_scan_i2t),
    "bfan": ("bfan", {}, naive_bfan),
    "chan": ("chan", {}, naive_chan),
}
PRODUCT = {"cpu": (2048, 1), "cuda": (8192, 8)}
"""Side of the square product that measures a device, and how many follow one another."""

TOLERATED = 2e-3


def caption_lengths(count: int, generator: torch.Generator) -> Tensor:
    """6 to 30 words, skewed to the short side, about 13.5 on average."""
    draws = torch.rand(count, 4, generator=generator, device=generator.device)
    waits = -draws.clamp(min=1e-9).log()  # their sum is a gamma of shape 4
    return (6 + waits.sum(1) * 1.98).long().clamp(6, 30)


def make_sides(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Encoded, Encoded]:
    device = options.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    images = l2_normalize(normal(options.images, options.regions, options.dim))
    lengths = caption_lengths(options.captions, generator)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    # each word is near a region of its caption's image, so that attention has something to find
    owners = torch.arange(options.captions, device=device) % options.images
    places = torch.randint(options.regions, mask.shape, generator=generator, device=device)
    noise = normal(*mask.shape, options.dim)
    words = (images[owners[:, None], places] + 0.04 * noise) * mask[..., None]
    shown = torch.ones(images.shape[:2], dtype=torch.bool, device=device)
    return Encoded(images.to(dtype), shown), Encoded(l2_normalize(words).to(dtype), mask)


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
    """Operations a second of a matrix product."""
    side, times = PRODUCT[device]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.backends.cuda.matmul.allow_tf32 = tf32

    def products() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    try:
        best = min(seconds(products, device) for _ in range(3))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    return 2 * side**3 * times / best


def copy_rate(device: str) -> float:
    """Bytes a second: memory to memory, or from a GPU to pinned memory."""
    source = torch.zeros(1 << 26, device=device)
    target = torch.empty(1 << 26, pin_memory=device == "cuda")
    best = min(seconds(lambda: target.copy_(source, non_blocking=True), device) for _ in range(3))
    return source.numel() * 4 / best


def rates(device: str, dtype: str) -> dict[str, float]:
    found = {name: product_rate(device, getattr(torch, name)) for name in {"float32", dtype}}
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


def multiplied(matcher: Matcher, images: Encoded, texts: Encoded) -> tuple[Encoded, Encoded]:
    """Both sides in the precision in which the engine multiplies them."""
    return for_kernels(matcher, images), for_kernels(matcher, texts)


def product_alone(matcher: Matcher, images: Encoded, texts: Encoded) -> Callable[[], None]:
    """The matrix product of all words with all regions, in pieces as the engine's are."""
    images, texts = multiplied(matcher, images, texts)
    assert images.fragments is not None
    assert texts.fragments is not None
    if by_kernels(matcher, images):
        plan = plan_for_kernels(images, texts, images.fragments.shape[-1])
    else:
        plan = plan_scores(images, texts)
    size = images.fragments.element_size()
    cells = BUFFER // size if images.fragments.is_cuda else BLOCK_CELLS
    spans = {(tile.texts.start, tile.texts.stop) for tile in plan.tiles}
    words = {}
    for start, stop in spans:
        some = texts[plan.order[start:stop]]
        words[start] = some.fragments[some.mask]  # type: ignore[index]
    widest = max(len(packed) for packed in words.values())
    buffer = images.fragments.new_empty(max(cells, widest * images.mask.shape[1]))

    def run() -> None:
        for tile in plan.tiles:
            packed = words[tile.texts.start]
            regions = images.fragments[tile.rows].flatten(0, 1)  # type: ignore[index]
            rows = max(images.mask.shape[1], cells // max(1, len(packed)))
            for part in regions.split(rows):
                out = buffer[: len(part) * len(packed)].view(len(part), len(packed))
                torch.mm(part, packed.T, out=out)

    return run


def check_sample(images: Encoded, texts: Encoded, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Captions spread over all lengths, and images, each of which is the owner of one of them."""
    captions, _ = some_captions(texts, sizes[1])
    owners = torch.unique(captions % len(images))
    at = torch.linspace(0, len(owners) - 1, min(sizes[0], len(owners)), device=owners.device)
    return owners[at.round().long()], captions


def errors(
    matcher: Matcher, images: Encoded, texts: Encoded, scores: Tensor, sizes: list[int]
) -> dict[str, float]:
    """How far scores are from the eager form in double precision."""
    assert isinstance(matcher, CrossAttentionMatcher)
    rows, columns = check_sample(images, texts, sizes)
    exact = copy.deepcopy(matcher).double()
    want = exact.torch_scores(_double(images[rows]), _double(texts[columns])).cpu()
    off = (scores[rows.cpu()][:, columns.cpu()].double() - want).abs()
    return {"error": float(off.max()), "beyond": float((off > TOLERATED).double().mean())}


def _double(encoded: Encoded) -> Encoded:
    assert encoded.fragments is not None
    return replace(encoded, fragments=encoded.fragments.double())


def caption_loop(
    name: str, images: Encoded, texts: Encoded, options: argparse.Namespace, scores: Tensor
) -> dict[str, float]:
    """Seconds that the loop would take for all captions, and how far its scores are from ours.

    In single precision and, where public code scores in double, on a CPU in that, too.
    """
    assert images.fragments is not None
    assert texts.fragments is not None
    naive = METHODS[name][2]
    chosen, lengths = some_captions(texts, options.loop_captions)
    given = images.fragments, texts.fragments[chosen]
    found: dict[str, float] = {}
    for key, dtype in (("loop", torch.float32), ("double", torch.float64)):
        if key == "double" and (name not in DOUBLE or options.device != "cpu"):
            continue
        regions, captions = (side.to(dtype) for side in given)
        looped: list[Tensor] = []
        naive(regions, captions[:2], lengths[:2])
        call = partial(_looped, looped, naive, regions, captions, lengths)
        found[key] = seconds(call, options.device) * len(texts) / len(chosen)
        found["apart"] = float((looped[0].cpu() - scores[:, chosen.cpu()]).abs().max())
    return found


def _looped(
    into: list[Tensor], naive: Naive, regions: Tensor, captions: Tensor, lengths: list[int]
) -> None:
    into.append(naive(regions, captions, lengths))


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    images, texts = make_sides(options, getattr(torch, options.dtype))
    ceilings: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {name: {} for name in options.methods}
    for number in range(options.rounds):  # in turn, so that a busy moment does not hit one alone
        for name in options.methods:
            print(f"round {number + 1}: {name} …", file=sys.stderr)
            kind, settings, _ = METHODS[name]
            matcher: Matcher = matchers[kind](options.dim, **settings).eval().to(options.device)
            keep_best(ceilings, rates(options.device, options.dtype), max)
            scores = [torch.empty(0)]

            def engine(matcher: Matcher = matcher, scores: list[Tensor] = scores) -> None:
                scores[0] = score_on_device(matcher, images, texts)

            def to_host(matcher: Matcher = matcher) -> None:
                score_matrix(matcher, images, texts)

            row = found[name]
            if "first" not in row:
                row["first"] = seconds(engine, options.device)
            product = product_alone(matcher, images, texts)
            product()
            best = {
                "engine": min(seconds(engine, options.device) for _ in range(options.repeat)),
                "host": min(seconds(to_host, options.device) for _ in range(options.repeat)),
                "product": min(seconds(product, options.device) for _ in range(options.repeat)),
            }
            keep_best(row, best, min)
            scores[0] = scores[0].cpu()
            if "error" not in row:
                row |= errors(matcher, images, texts, scores[0], options.check)
                half = multiplied(matcher, images, texts)[0].fragments
                row["precision"] = str(half.dtype).removeprefix("torch.")  # type: ignore[union-attr]
            if number < options.loop_rounds and options.loop_captions > 0:
                keep_best(row, caption_loop(name, images, texts, options, scores[0]), min)
    work = 2 * int(texts.mask.sum()) * images.mask.numel() * options.dim
    pairs = len(images) * len(texts)
    for row in found.values():
        row["floor"] = work / ceilings[row["precision"]]
        row["share"] = row["floor"] / row["engine"]
        row["pairs_per_second"] = pairs / row["engine"]
        if "loop" in row:
            row["ratio"] = row["loop"] / row["engine"]
        if "double" in row:
            row["double_ratio"] = row["double"] / row["engine"]
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "ceilings": ceilings,
        "pairs": pairs,
        "words": float(texts.mask.sum() / len(texts)),
        "looped": min(options.loop_captions, len(texts)),
        "methods": found,
    }


def tables(result: dict[str, Any]) -> list[list[tuple[str, ...]]]:
    """What is printed: speed and exactness, then the roofline."""
    speed: list[tuple[str, ...]] = [
        ("method", "engine s", "on host s", "pairs/s", "first s", "loop s", "ratio", "in double s",
         "ratio", "differ by", "max error", f"beyond {TOLERATED:g}"),
    ]  # fmt: skip
    roof: list[tuple[str, ...]] = [
        ("method", "precision", "floor s", "product s", "engine s", "engine/product", "share")
    ]
    for name, row in result["methods"].items():
        looped = ["–"] * 5
        if "loop" in row:
            looped[:2] = f"{row['loop']:.2f}", f"{row['ratio']:.1f}"
            looped[4] = f"{row['apart']:.1e}"
        if "double" in row:
            looped[2:4] = f"{row['double']:.2f}", f"{row['double_ratio']:.1f}"
        speed.append(
            (name, f"{row['engine']:.3f}", f"{row['host']:.3f}", f"{row['pairs_per_second']:,.0f}",
             f"{row['first']:.2f}", *looped, f"{row['error']:.1e}", f"{row['beyond']:.1e}")
        )  # fmt: skip
        ratio = row["engine"] / row["product"]
        times = (f"{row[key]:.3f}" for key in ("floor", "product", "engine"))
        roof.append((name, row["precision"], *times, f"{ratio:.2f}", f"{row['share']:.0%}"))
    return [speed, roof]


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
    parser.add_argument("--loop-captions", type=int, default=256, help="0: no loop")
    parser.add_argument(
        "--check", nargs=2, type=int, default=[64, 500], help="images and captions to check"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(options.threads)
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return 0
    rates_said = ", ".join(
        f"{name} {rate / 1e12:,.3g} TFLOP/s"
        for name, rate in result["ceilings"].items()
        if name != "copy"
    )
    print(f"{result['device']}; matrix product: {rates_said}; ", end="")
    print(f"copy {result['ceilings']['copy'] / 1e9:.1f} GB/s")
    print(
        f"{options.images} images, {options.captions} captions of {result['words']:.1f} words; "
        f"{options.threads} threads, {options.clock} time"
    )
    for table in tables(result):
        print("\n" + "\n".join(markdown_table(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
