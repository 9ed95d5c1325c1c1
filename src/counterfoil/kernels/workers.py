"""Independent pieces of work on the cores that PyTorch may use, one piece a core.

Many short operations in a row gain little from several cores each: these wait for one another after
every one, and on a busy machine for whichever is not having its turn. Pieces that need nothing of
each other do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 8
"""Workers; beyond, they would wait for the interpreter. Each then has several cores."""


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results in the order of the items, without gradients; the first items are begun first."""
    threads = torch.get_num_threads()
    workers = min(threads, MOST, len(items))
    if workers < 2:
        with torch.no_grad():
            return [work(item) for item in items]
    inference = torch.is_inference_mode_enabled()  # known to this thread only

    def one(item: Item) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return work(item)

    share = threads // workers
    try:
        with ThreadPoolExecutor(workers, "scores", torch.set_num_threads, (share,)) as pool:
            return list(pool.map(one, items))
    finally:
        torch.set_num_threads(threads)  # what threads begun from now on take as their number
