"""Choice of a device, its free memory, and a guard against models that do not fit."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterfoil.core.errors import ConfigError

MEMORY = Path("/proc/meminfo")

UNKNOWN_FREE, UNKNOWN_TOTAL = 1 << 30, 64 << 30
"""Bytes assumed free, and in total, if the system does not say."""

FREE_MEMORY_SHARE = 0.5
"""Share of a device's memory that has to stay free for training."""

TRAINING_COPIES = 4
"""Copies of the weights in training: weights, gradients, and Adam's two moments."""

MAX_TENSORS = 20_000
"""Parameters of one model; our largest has a few thousand."""


def choose_device(name: str) -> torch.device:
    """The device of this name; 'auto' is this process's GPU if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}': expected auto, cpu, cuda or cuda:0 …") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}': no CUDA device is available; use auto or cpu")
    return device


def free_on_gpu(device: torch.device) -> int:
    """Bytes available for new tensors: free ones, and those that PyTorch's allocator caches."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + max(0, cached)


def free_memory(device: torch.device) -> int:
    """Bytes available on a device."""
    if device.type == "cuda":
        return free_on_gpu(device)
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return UNKNOWN_FREE


def room_for(size: int, device: torch.device) -> bool:
    """Whether a GPU can hold ``size`` bytes and still have memory for training."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - size >= FREE_MEMORY_SHARE * total


def machine_memory() -> int:
    """Total bytes of the machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_TOTAL


class MemoryGuard(TorchDispatchMode):
    """While active, limits the total size of new tensors to ``limit`` bytes.

    Sizes are checked before allocation, whichever option made a model large: the width, the number
    of layers or copies, the vocabulary. The default limit allows ``copies`` copies of the weights:
    those of a training run, or 1 to load a model.
    """

    def __init__(self, limit: int | None = None, copies: int = TRAINING_COPIES) -> None:
        super().__init__()
        self.limit = machine_memory() // copies if limit is None else limit
        self.copies = copies
        self.allocated = self.tensors = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Models are built outside compiled code; True would import `torch._dynamo` (slow)."""
        return False

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
                "reduce the number of layers or copies"
            )
        if self.allocated > self.limit:
            training = f" (training holds {self.copies} times as much)" if self.copies > 1 else ""
            raise ConfigError(
                f"model: its weights need more than {self.limit / 2**30:.1f} GiB{training}, "
                f"and the machine has {machine_memory() / 2**30:.1f} GiB; reduce model.embed_size, "
                "or the number of layers, words or copies"
            )


def _are_sides(size: list[Any] | tuple[Any, ...]) -> bool:
    return bool(size) and all(type(side) is int for side in size)
