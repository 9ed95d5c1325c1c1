"""Block sizes of MaxSim's kernel: which are the quickest on this GPU, by width.

    python benchmarks/maxsim_blocks.py --dim 128 1024

For each width, the kernel over all pairs with each of the block sizes in `CHOICES`, best of three
runs, without the sums over query tokens. The first of them is what `cf.maxsim` uses
(`kernels/triton/maxsim.py`: `candidates`). Kernels are compiled beforehand, by several processes
that share Triton's cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from maxsim import Sides, first_line, timed
from triton.runtime.errors import OutOfResources

from counterfoil.evaluation.report import markdown_table
from counterfoil.kernels.triton.maxsim import Blocks, _launch, candidates

WHOLE = (
    Blocks(128, 32, 4, 128, 1, 8, 2, registers=128),
    Blocks(128, 32, 4, 128, 8, 8, 2, registers=128),
    Blocks(128, 32, 4, 128, 4, 8, 3),
    Blocks(128, 64, 4, 128, 4, 8, 2),
    Blocks(128, 16, 4, 128, 4, 4, 3),
    Blocks(128, 32, 2, 128, 4, 8, 3, registers=128),
    Blocks(256, 32, 4, 128, 4, 16, 2, registers=128),
    Blocks(64, 32, 4, 128, 4, 4, 2),
)
PARTS = (
    Blocks(128, 64, 4, 64, 1, 8, 4),
    Blocks(128, 64, 4, 128, 1, 8, 2),
    Blocks(128, 32, 4, 64, 1, 8, 3, registers=128),
    Blocks(128, 32, 4, 64, 1, 4, 4),
    Blocks(256, 32, 4, 64, 1, 8, 3),
    Blocks(256, 32, 4, 64, 1, 16, 3, registers=128),
    Blocks(128, 32, 8, 64, 1, 8, 3),
)
CHOICES = {128: WHOLE, 1024: PARTS}


def choices(dim: int) -> list[Blocks]:
    return [next(candidates(dim, torch.float16, 1 << 20)), *CHOICES[dim]]


def compile_only(dim: int, number: int) -> None:
    """Launch one choice on a few vectors, so that its kernel is in Triton's cache."""
    packed = torch.zeros(512, dim, dtype=torch.float16, device="cuda")
    documents = torch.zeros(4096, 36, dim, dtype=torch.float16, device="cuda")
    best = torch.zeros(512, 4096, device="cuda")
    _launch(packed, documents, None, best, None, choices(dim)[number])
    torch.cuda.synchronize()


def compile_all(dims: list[int]) -> None:
    def run(job: tuple[int, int]) -> None:
        command = [sys.executable, __file__, "--compile", *map(str, job)]
        subprocess.run(command, check=False, capture_output=True)

    jobs = [(dim, number) for dim in dims for number in range(len(choices(dim)))]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, jobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=5000, help="documents")
    parser.add_argument("--captions", type=int, default=25000, help="queries")
    parser.add_argument("--regions", type=int, default=36, help="vectors per document")
    parser.add_argument("--dim", nargs="+", type=int, choices=list(CHOICES), default=[128, 1024])
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_only(*options.compile)
        return 0
    options.device, options.dtype = "cuda", "float16"
    compile_all(options.dim)
    rows: list[tuple[str, ...]] = [("D", "block sizes", "seconds")]
    for dim in options.dim:
        sides = Sides.make(options, dim, options.captions, options.images)
        packed, documents = sides.packed, sides.documents
        count = min(len(documents), 640)
        best = packed.new_empty(len(packed) * count, dtype=torch.float32)

        def score(blocks, packed=packed, documents=documents, best=best, count=count) -> None:
            for part in documents.split(count):
                out = best[: len(packed) * len(part)].view(len(packed), -1)
                _launch(packed, part, None, out, None, blocks)

        for blocks in choices(dim):
            try:
                score(blocks)
                taken = f"{min(timed(lambda b=blocks: score(b), 'cuda') for _ in range(3)):.4f}"
            except (OutOfResources, RuntimeError) as problem:
                taken = first_line(problem)
            rows.append((str(dim), str(blocks), taken))
            print(*rows[-1], file=sys.stderr, flush=True)
    print("\n".join(markdown_table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
