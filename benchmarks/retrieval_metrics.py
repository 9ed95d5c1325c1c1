"""Time and memory of retrieval metrics: counting ranks against sorting every row and column.

    python benchmarks/retrieval_metrics.py --images 5000 --captions-per-image 5

Both evaluate the same score matrix, free of ties that matter, and must agree on every rank (the
exit code says so); then both meet a model that scores everything equal. Peak memory is what was
allocated beyond the matrix itself; that of sorting is taken over its first queries, which are all
alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from counterfoil.evaluation import count_ranks, retrieval

Ranks = tuple[NDArray[np.int64], NDArray[np.int64]]
Shown = Callable[[Iterable[int], str], Iterable[int]]


def silent(items: Iterable[int], description: str) -> Iterable[int]:
    return items


def visible(items: Iterable[int], description: str) -> Iterable[int]:
    return track(items, description, console=Console(stderr=True), transient=True)


def sorted_ranks(
    scores: NDArray[np.float32], per_image: int, show: Shown, queries: int | None = None
) -> Ranks:
    """Ranks found by sorting: every row for its image, every column for its caption."""
    n_images, n_texts = scores.shape
    images, texts = min(n_images, queries or n_images), min(n_texts, queries or n_texts)
    i2t, t2i = np.zeros(images, dtype=np.int64), np.zeros(texts, dtype=np.int64)
    for image in show(range(images), "sorting rows"):
        order = np.argsort(scores[image])[::-1]
        own = range(per_image * image, per_image * (image + 1))
        i2t[image] = min(np.where(order == text)[0][0] for text in own)
    by_text = scores.T
    for text in show(range(texts), "sorting columns"):
        order = np.argsort(by_text[text])[::-1]
        t2i[text] = np.where(order == text // per_image)[0][0]
    return i2t, t2i


def rsum(ranks: Ranks) -> float:
    return float(sum(100.0 * np.mean(side < k) for side in ranks for k in (1, 5, 10)))


def timed(work: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    best = float("inf")
    result = None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return result, best


def peak_megabytes(work: Callable[[], Any]) -> float:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def constant_scores(n_images: int, per_image: int) -> dict[str, float]:
    """RSUM of a model that has learnt nothing, by three ways of ranking."""
    scores = np.zeros((n_images, n_images * per_image), dtype=np.float32)
    image_of = np.repeat(np.arange(n_images), per_image)
    ours = retrieval(scores, image_of, bootstrap=0)
    greater = tuple(np.zeros(size, dtype=np.int64) for size in scores.shape)
    return {
        "images": n_images,
        "counting": ours.rsum,
        "sorting": rsum(sorted_ranks(scores, per_image, silent)),
        "strictly_greater": rsum((greater[0], greater[1])),
        "chance": ours.rsum_chance,
    }


def run(n_images: int, per_image: int, seed: int, show: Shown) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    n_texts = n_images * per_image
    image_of = np.repeat(np.arange(n_images), per_image)
    scores = rng.standard_normal((n_images, n_texts), dtype=np.float32)
    scores[image_of, np.arange(n_texts)] += 3.0
    lower_ties(scores, image_of)
    ours, counting = timed(lambda: count_ranks(scores, image_of), repeats=5)
    report, whole = timed(lambda: retrieval(scores, image_of, seed=seed))
    counting_peak = peak_megabytes(lambda: count_ranks(scores, image_of))
    naive, sorting = timed(lambda: sorted_ranks(scores, per_image, show))
    sorting_peak = peak_megabytes(lambda: sorted_ranks(scores, per_image, silent, queries=20))
    differing = sum(
        int(np.count_nonzero(one != other))
        for one, other in zip((ours.i2t, ours.t2i), naive, strict=True)
    )
    return {
        "images": n_images,
        "captions": n_texts,
        "seed": seed,
        "differing_ranks": differing,
        "rsum": report.rsum,
        "counting_seconds": counting,
        "report_with_bootstrap_seconds": whole,
        "sorting_seconds": sorting,
        "ratio": sorting / counting,
        "counting_peak_mb": counting_peak,
        "sorting_peak_mb": sorting_peak,
        "constant_scores": constant_scores(min(n_images, 500), per_image),
    }


def lower_ties(scores: NDArray[np.float32], image_of: NDArray[np.int64]) -> None:
    """Lower every wrong score that equals a positive's in its row or column, until none does."""
    texts = np.arange(len(image_of))
    own = scores[image_of, texts]
    tied = True
    while tied:
        tied = False
        for image, row in enumerate(scores):
            wrong = image_of != image
            cells = wrong & ((row == own) | np.isin(row, own[~wrong]))
            if cells.any():
                row[cells] -= 0.5
                tied = True


def summary(result: dict[str, Any]) -> str:
    flat = result["constant_scores"]
    return "\n".join(
        [
            f"{result['images']} images x {result['captions']} captions, RSUM {result['rsum']:.1f}",
            f"  sorting rows and columns   {result['sorting_seconds']:9.3f} s   "
            f"{result['sorting_peak_mb']:8.2f} MB beside the matrix",
            f"  counting                   {result['counting_seconds']:9.3f} s   "
            f"{result['counting_peak_mb']:8.2f} MB beside the matrix",
            f"  counting + report + 1000 bootstrap resamples "
            f"{result['report_with_bootstrap_seconds']:.3f} s",
            f"  ratio {result['ratio']:.0f}x; {result['differing_ranks']} ranks differ",
            f"everything scored equal, {flat['images']} images (RSUM by chance "
            f"{flat['chance']:.1f}):",
            f"  RSUM {flat['sorting']:.1f} by sorting (the last of the file win), "
            f"{flat['strictly_greater']:.1f} by counting strictly greater scores, "
            f"{flat['counting']:.1f} by counting ties against the model",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--captions-per-image", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    show = visible if sys.stderr.isatty() else silent
    result = run(options.images, options.captions_per_image, options.seed, show)
    print(json.dumps(result, indent=2) if options.json else summary(result))
    return 1 if result["differing_ranks"] else 0


if __name__ == "__main__":
    sys.exit(main())
