"""Distributed training: process groups under torchrun, and collectives with gradients.

Every backward pass here sums over processes, which gives the exact gradient of the sum of all
processes' losses. Each process computes the same global loss, so the mean that
DistributedDataParallel takes equals the gradient in a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterfoil.core.errors import CounterfoilError
from counterfoil.core.parallel import end_with_parent

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that a process has to finish its writes after torchrun was killed."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def sum_over_processes(value: Tensor) -> Tensor:
    return value if world_size() == 1 else _SumOverProcesses.apply(value)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        shape = (max(counts), *value.shape[1:])
        mine = value.new_zeros(shape)
        mine[: value.shape[0]] = value
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        start = sum(ctx.counts[: dist.get_rank()])
        return total[start : start + ctx.counts[dist.get_rank()]], None


def gather_rows(value: Tensor) -> Tensor:
    """Rows of all processes, in rank order; their numbers may differ."""
    if world_size() == 1:
        return value
    counts = gather_counts(value.shape[0], value.device)
    if value.dtype == torch.bool:
        return gather_rows(value.to(torch.uint8)).bool()
    return _GatherRows.apply(value, counts)


def gather_counts(count: int, device: torch.device) -> list[int]:
    """The ``count`` of each process, in rank order."""
    if world_size() == 1:
        return [count]
    mine = torch.tensor([count], device=device)
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return [int(part) for part in parts]


def any_process(flag: bool, device: torch.device) -> bool:
    """True if the flag is set in any process, so that all of them stop at the same step."""
    if world_size() == 1:
        return flag
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes)
    return bool(votes.item())


def gather_unique(texts: list[str]) -> list[str]:
    """The texts of all processes, each once."""
    if world_size() == 1:
        return texts
    parts: list[list[str]] = [[] for _ in range(world_size())]
    dist.all_gather_object(parts, texts)
    return list(dict.fromkeys(text for part in parts for text in part))


def wait_for_all() -> None:
    """Return when every process has come here."""
    if world_size() > 1:
        dist.barrier()


@contextmanager
def processes(environment: Mapping[str, str]) -> Iterator[bool]:
    """Join the process group that torchrun describes in the environment, if any.

    Yields whether this is the first process. The backend is NCCL with GPUs, gloo without.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched():  # a killed torchrun does not end its processes
        end_with_parent(GRACE_SECONDS)
    # the first process may prepare data for hours while the others wait
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=12))
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


class FirstProcessError(CounterfoilError):
    """An error of the first process, raised in all others."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def read_in_turn(read: Callable[[], T]) -> T:
    """Call ``read`` in the first process, then in the others, which find what it has cached."""
    result = on_first_process(read)
    return read() if result is None else result


def on_first_process(action: Callable[[], T]) -> T | None:
    """Run ``action`` in the first process while the others wait; None in the others.

    If it fails, every process raises, so that none waits for a process that has ended.
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
    failure: list[tuple[str, int] | None] = [None]
    if error is not None:
        failure = [(str(error) or type(error).__name__, getattr(error, "exit_code", 1))]
    dist.broadcast_object_list(failure)
    dist.barrier()  # the first process must not end before all have received it
    if error is not None:
        raise error
    if failure[0] is not None:
        raise FirstProcessError(*failure[0])
    return result
