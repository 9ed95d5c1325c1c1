"""A model that cannot fit into memory is refused before its weights are allocated."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterfoil.errors import ConfigError

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
