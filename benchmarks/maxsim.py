"""MaxSim of every query with every document: `cf.maxsim` beside public kernels, on one GPU.

    pip install late-interaction-kernels flash-maxsim
    python benchmarks/maxsim.py
    python benchmarks/maxsim.py --images 500 --captions 2500 --parts score train

Captions ask, images answer: ``--captions`` queries of 6 to 30 words with ``--images`` documents of
36 regions, random unit vectors in half precision, words near a region of their image
(`score_all.make_sides`). All libraries get the same tensors. A library that is not installed is
left out, with a line that says so. *packed* is the form of a library that takes words without
padding; the others get a mask or lengths.

``score``: all pairs, without gradients. *seconds* are medians of runs between CUDA events, after
one call that is not counted (*first call*: kernels are compiled and tuned there, unless a cache has
them). *product* is the matrix product of all words and regions alone, its results thrown away: what
the arithmetic takes. *error* is the largest difference from the same scores of some queries in
single precision.

``train``: scores of a batch and the gradients of both sides, for a gradient of every score.

``first``: the first call of `cf.maxsim` in a new process, with an empty Triton cache and with the
one that this left, less the second call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from score_all import make_sides
from torch import Tensor

import counterfoil as cf
from counterfoil.evaluation.report import markdown_table

PARTS = ("score", "train", "first")
CHECKED = 256
"""Queries whose scores are compared."""

PRODUCT_CELLS = 1 << 29
"""Similarities of one matrix product of the arithmetic's row: 1 GB in half precision."""


@dataclass(frozen=True)
class Sides:
    """Queries and documents with masks, as the libraries want them."""

    queries: Tensor
    documents: Tensor
    mask: Tensor
    lengths: Tensor
    packed: Tensor

    @classmethod
    def make(cls, options: argparse.Namespace, dim: int, captions: int, images: int) -> Sides:
        size = argparse.Namespace(
            device=options.device, regions=options.regions, dim=dim, captions=captions,
            images=images,
        )  # fmt: skip
        documents, queries = make_sides(size, getattr(torch, options.dtype))
        # padding is a unit vector, too: a library that samples the norms would else complain
        words = queries.fragments
        words = torch.where(queries.mask[..., None], words, words[:, :1])
        lengths = queries.mask.sum(1, dtype=torch.int32)
        packed = words[queries.mask].contiguous()
        return cls(words, documents.fragments, queries.mask, lengths, packed)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Where packed queries and documents begin and end."""
        count, longest, _ = self.documents.shape
        starts = torch.nn.functional.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        ends = torch.arange(count + 1, dtype=torch.int32, device=starts.device) * longest
        return starts, ends


Score = Callable[[Sides], Tensor]


def ours(sides: Sides) -> Tensor:
    return cf.maxsim(sides.queries, sides.documents, sides.mask)


def public_kernels(training: bool) -> Iterator[tuple[str, Score]]:
    """The public libraries that are installed, by their documented entry points."""
    try:
        import late_interaction_kernels as lik
    except ImportError:
        print("late-interaction-kernels: not installed, left out", file=sys.stderr)
    else:
        yield "late-interaction-kernels", lambda s: lik.maxsim(s.queries, s.documents, s.mask)
        yield (
            "late-interaction-kernels, packed",
            lambda s: lik.maxsim_varlen(
                s.packed,
                s.documents.flatten(0, 1),
                *s.bounds(),
                s.mask.shape[1],
                s.documents.shape[1],
            ),
        )
    try:
        import flash_maxsim as flash
    except ImportError:
        print("flash-maxsim: not installed, left out", file=sys.stderr)
    else:
        score = flash.flash_maxsim_batched_train if training else flash.flash_maxsim_batched
        yield "flash-maxsim", lambda s: score(s.queries, s.documents, query_lengths=s.lengths)


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of a call; of a GPU's work, between two events."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def median(call: Callable[[], Any], options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Seconds of the first call, the median of runs until ``--seconds`` have passed; a result."""
    began = time.perf_counter()
    result = call()
    if options.device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    runs: list[float] = []
    while len(runs) < options.runs and (not runs or sum(runs) < options.seconds):
        runs.append(timed(call, options.device))
    return {"seconds": statistics.median(runs), "runs": len(runs), "first": first}, result


def reference(sides: Sides) -> Tensor:
    """Scores of some queries in single precision, document by document."""
    queries, mask = sides.queries[:CHECKED].float(), sides.mask[:CHECKED]
    columns = []
    for document in sides.documents.float():
        best = (queries @ document.T).amax(-1)
        columns.append((best * mask).sum(-1))
    return torch.stack(columns, 1)


def product(sides: Sides) -> None:
    """The matrix product alone, in pieces."""
    flat = sides.documents.flatten(0, 1)
    rows = max(1, PRODUCT_CELLS // len(flat))
    out = flat.new_empty(rows, len(flat))
    for part in sides.packed.split(rows):
        torch.mm(part, flat.T, out=out[: len(part)])


def score_rows(options: argparse.Namespace, dim: int) -> Iterator[dict[str, Any]]:
    sides = Sides.make(options, dim, options.captions, options.images)
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = reference(sides)
    size = {"part": "score", "dim": dim, "queries": options.captions, "documents": options.images}
    kernels: list[tuple[str, Score]] = [("counterfoil", ours), *public_kernels(training=False)]
    with torch.no_grad():
        for name, score in kernels:
            try:
                row, scores = median(lambda score=score: score(sides), options)
            except Exception as problem:  # a public kernel may not take this size
                yield {**size, "name": name, "problem": first_line(problem)}
                continue
            error = float((scores[:CHECKED].float() - exact).abs().max())
            yield {**size, "name": name, **row, "error": error}
        yield {**size, "name": "product alone", **median(lambda: product(sides), options)[0]}


def train_rows(options: argparse.Namespace, dim: int, batch: int) -> Iterator[dict[str, Any]]:
    sides = Sides.make(options, dim, batch, batch)
    leaves = [x.requires_grad_() for x in (sides.queries, sides.documents, sides.packed)]
    generator = torch.Generator(options.device).manual_seed(1)
    upstream = torch.randn(batch, batch, generator=generator, device=options.device)
    size = {"part": "train", "dim": dim, "queries": batch, "documents": batch}
    gradient: Tensor | None = None
    for name, score in [("counterfoil", ours), *public_kernels(training=True)]:

        def step(score: Score = score) -> None:
            for leaf in leaves:
                leaf.grad = None
            scores = score(sides)
            scores.backward(upstream.to(scores.dtype))

        try:
            row, _ = median(step, options)
        except Exception as problem:
            yield {**size, "name": name, "problem": first_line(problem)}
            continue
        own = sides.documents.grad.float()
        gradient = own if gradient is None else gradient
        error = float((own - gradient).abs().max() / gradient.abs().max())
        yield {**size, "name": name, **row, "error": error}


def first_call(options: argparse.Namespace, dim: int) -> dict[str, Any]:
    """Seconds of the first call less those of the second, in new processes: cold cache, warm."""
    row: dict[str, Any] = {"part": "first", "dim": dim, "name": "counterfoil"}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            command = [sys.executable, __file__, "--first-call", str(dim), "--dtype", options.dtype]
            command += ["--device", options.device, "--images", "512", "--captions", "2048"]
            environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                return {**row, "problem": (done.stderr.splitlines() or ["it failed"])[-1]}
            row[cache] = float(done.stdout)
    return row


def print_first_call(options: argparse.Namespace) -> None:
    """What a new process of `first_call` measures."""
    sides = Sides.make(options, options.first_call, options.captions, options.images)

    def clocked(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    # PyTorch's own start (context, product libraries) is no part of it
    clocked(lambda: product(sides))
    first = clocked(lambda: ours(sides))
    print(first - clocked(lambda: ours(sides)))


def first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:120]


def tables(rows: list[dict[str, Any]]) -> Iterator[list[tuple[str, ...]]]:
    headers = {
        "score": ("D", "queries × documents", "", "seconds", "first call", "error"),
        "train": ("D", "batch", "", "ms a step", "first call", "gradient's difference"),
        "first": ("D", "", "cold cache", "warm cache"),
    }
    for part, header in headers.items():
        lines = [line(row) for row in rows if row["part"] == part]
        if lines:
            yield [header, *lines]


def line(row: dict[str, Any]) -> tuple[str, ...]:
    if row["part"] == "first":
        times = [f"{row[cache]:.2f} s" if cache in row else "–" for cache in ("cold", "warm")]
        return str(row["dim"]), row.get("problem", row["name"]), *times
    scoring = row["part"] == "score"
    size = f"{row['queries']:,} × {row['documents']:,}" if scoring else f"{row['queries']:,}"
    start = (str(row["dim"]), size, row["name"])
    if "problem" in row:
        return *start, row["problem"], "–", "–"
    seconds = f"{row['seconds']:.4f}" if scoring else f"{1e3 * row['seconds']:.2f}"
    error = f"{row['error']:.1e}" if "error" in row else "–"
    return *start, seconds, f"{row['first']:.1f} s", error


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for dim in options.dim:
        if "score" in options.parts:
            yield from score_rows(options, dim)
        for batch in options.batch if "train" in options.parts else ():
            yield from train_rows(options, dim, batch)
        if "first" in options.parts:
            yield first_call(options, dim)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=5000, help="documents")
    parser.add_argument("--captions", type=int, default=25000, help="queries")
    parser.add_argument("--regions", type=int, default=36, help="vectors per document")
    parser.add_argument("--dim", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--batch", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of one row's runs")
    parser.add_argument("--json", metavar="OUT", help="write the rows to a file, too")
    parser.add_argument("--first-call", type=int, metavar="DIM", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        print_first_call(options)
        return 0
    rows: list[dict[str, Any]] = []
    for row in measured(options):
        print(*line(row), file=sys.stderr, sep=" | ", flush=True)
        rows.append(row)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, {options.dtype}, documents of {options.regions} vectors")
    for table in tables(rows):
        print("\n" + "\n".join(markdown_table(table)))
    if options.json:
        Path(options.json).write_text(json.dumps({"device": device, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
