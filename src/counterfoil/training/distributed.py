"""Several processes started by torchrun as one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from counterfoil.collectives import rank, world_size
from counterfoil.errors import CounterfoilError
from counterfoil.parallel import end_with_parent

T = TypeVar("T")

GRACE = 5.0
"""Seconds that a process has to write what it is writing when torchrun was killed."""


@contextmanager
def processes(environment: Mapping[str, str]) -> Iterator[bool]:
    """Join the group that torchrun describes in the environment, if any; yields 'am I the first'.

    NCCL where every process has a GPU, gloo elsewhere.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched():  # torchrun ends its processes, unless it is killed
        end_with_parent(GRACE)
    # the first process may draw or extract for hours while the others wait for it
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=12))
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


class FirstProcessError(CounterfoilError):
    """An error of the first process, which ends the others, too."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def on_first_process(action: Callable[[], T]) -> T | None:
    """Do something in the first process while the others wait; None in the others.

    If it fails there, every process raises: nobody waits for a process that has ended.
    """
    if world_size() == 1:
        return action()
    error: Exception | None = None
    result: T | None = None
    if rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error = raised
    news: list[tuple[str, int] | None] = [None]
    if error is not None:
        news = [(str(error) or type(error).__name__, getattr(error, "exit_code", 1))]
    dist.broadcast_object_list(news)
    dist.barrier()  # the first process must not end before all have heard of it
    if error is not None:
        raise error
    if news[0] is not None:
        raise FirstProcessError(*news[0])
    return result
