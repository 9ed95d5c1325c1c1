"""Choice of the device that models run on."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterfoil.core.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """The device asked for; 'auto' takes this process's GPU if there is one."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}': expected auto, cpu, cuda or cuda:0 …") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}': no CUDA device can be used here")
    return device


# Pairwise scores from fragment similarities in PyTorch, tile by tile, forward and backward.
#
# All similarities of a block come from one matrix product. What follows is elementwise or small
# and
# bound by memory traffic, so it runs on tiles that stay in the cache (on a GPU: in free memory).
# The
# backward pass recomputes a tile from its similarities instead of keeping intermediate values.
#
# A hinge on the hardest negative gives a gradient to three scores per row and column only: the
# positive, its hardest caption and its hardest image. The backward pass then looks at these pairs
# alone (`chosen_pairs`): with B pairs, 3B of B² are left.


def free_on_gpu(device: torch.device) -> int:
    """Bytes that tensors may still take: those that nobody has, and those this process keeps.

    PyTorch keeps what tensors have left for the next ones, which others see as taken.
    """
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + max(0, kept)


# How all pairs of two encoded sides are cut into tiles: captions by length, sizes by memory.


MEMORY = Path("/proc/meminfo")
UNKNOWN = 1 << 30
"""Bytes taken as free where a system does not say."""


def free_memory(device: torch.device) -> int:
    """Bytes that may be had on a device."""
    if device.type == "cuda":
        return free_on_gpu(device)
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return UNKNOWN


# Training features kept on the device, where there is room for them.
#
# For Flickr30K they are 4.3 GB in half precision. Read once, a batch then takes its fragments by
# one
# gather on the device; what travels from the processes that read ahead is captions and places.


LEFT_FREE = 0.5
"""Share of a device's memory that has to stay free for training."""


def room_for(size: int, device: torch.device) -> bool:
    """Whether a GPU can hold so many bytes and still train."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - size >= LEFT_FREE * total


# A model that cannot fit into memory is refused before its weights are allocated.


COPIES = 4
"""Of its weights that a training run holds: they, their gradients, and Adam's two moments."""

MAX_TENSORS = 20_000
"""Of one model; the largest of ours have a few thousand."""

_UNKNOWN = 64 * 2**30


def machine_memory() -> int:
    """Bytes of memory that the machine has in all."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _UNKNOWN


class MemoryGuard(TorchDispatchMode):
    """While it is active, new tensors may take ``limit`` bytes together.

    It sees sizes before anything is allocated, so it holds whichever option made a model large:
    the width, the number of layers or copies, the vocabulary. By default the limit leaves room for
    ``copies`` of the weights: those of a training run, or 1 to load a model.
    """

    def __init__(self, limit: int | None = None, copies: int = COPIES) -> None:
        super().__init__()
        self.limit = machine_memory() // copies if limit is None else limit
        self.copies = copies
        self.allocated = self.tensors = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        size = args[0] if args else None
        on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if isinstance(size, list | tuple) and _are_sides(size) and not on_meta:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            self._count(math.prod(size) * dtype.itemsize)
        return func(*args, **kwargs)

    def _count(self, size: int) -> None:
        self.tensors += 1
        self.allocated += size
        if self.tensors > MAX_TENSORS:
            raise ConfigError(
                f"model: it has more than {MAX_TENSORS:,} weights and biases; "
                "make the number of layers or copies smaller"
            )
        if self.allocated > self.limit:
            training = f" (training holds {self.copies} times as much)" if self.copies > 1 else ""
            raise ConfigError(
                f"model: its weights need more than {self.limit / 2**30:.1f} GiB{training}, "
                f"and the machine has "
                f"{machine_memory() / 2**30:.1f} GiB; make model.embed_size, or the number of "
                "layers, words or copies, smaller"
            )


def _are_sides(size: list[Any] | tuple[Any, ...]) -> bool:
    return bool(size) and all(type(side) is int for side in size)
