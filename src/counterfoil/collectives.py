"""Differentiable collectives: what one process computes from all, with gradients to all.

Every backward here sums over processes, so that together they are the exact gradient of the sum of
all processes' losses. As each process computes the same global loss, the mean over processes that
DistributedDataParallel takes is then the gradient of that loss, as a single process would have it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    """Rows of all processes, in process order; numbers of rows may differ."""
    if world_size() == 1:
        return value
    counts = gather_counts(value.shape[0], value.device)
    if value.dtype == torch.bool:
        return gather_rows(value.to(torch.uint8)).bool()
    return _GatherRows.apply(value, counts)


def gather_counts(count: int, device: torch.device) -> list[int]:
    """The integer that each process gives, in process order."""
    if world_size() == 1:
        return [count]
    mine = torch.tensor([count], device=device)
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return [int(part) for part in parts]
