"""Parameters of the fused kernels (`KernelSpec`), the scoring job, and hardware checks."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

OLDEST_CAPABILITY = (8, 0)
"""Lowest compute capability with the tensor cores that the kernels use."""

MAX_SOFTMAX_SCALE = 40.0
"""Above it, e^scale squared overflows single precision."""

MAX_REGIONS = 128
"""Most regions that fit a tile."""

WORDS, SLOTS = 128, 16
"""Words and captions per tile."""

ENTRIES_PER_LOAD = 4
"""Entries of a Gram matrix's triangle that a thread loads at once; triangles are padded to it, and
those of different threads alternate by as many. Loads, not multiplications, bound the kernels."""

THREAD_PER_CAPTION_CELLS = 1 << 31
"""Similarities from which on thread-per-caption kernels are used, such as 1,000 images of 36
regions with 5,000 captions of 12 words. They are twice to five times as fast as tiles, and pay off
if scores are computed more than once: they take seconds to compile the first time."""

LARGE_JOB_CELLS = 1 << 33
"""Similarities from which on `torch.compile` pays off, which takes a minute in every process."""


@dataclass(frozen=True)
class ScoringJob:
    """The job that a block of pairs belongs to; ``cells`` counts its word-region similarities.

    If the size is unknown (0), the size of the block is used.
    """

    cells: int = 0

    @property
    def large(self) -> bool:
        return self.cells >= LARGE_JOB_CELLS


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel computes: the query side, the attention weights, the pooling of fragments."""

    method: Literal["scan", "bfan", "chan", "naaf", "chamfer"]
    query_side: Literal["text", "image"] = "text"
    scale: float = 1.0
    pooling: Literal["lse", "mean", "max", "sum", "softmax"] = "mean"
    lse_scale: float = 1.0
    activation: Literal["leaky", "relu", "none"] = "leaky"
    prob: bool = False
    boundary: float = 0.0
    negative: bool = True
    propagation: Literal["none", "soft", "gate"] = "none"
    gate_scale: float = 0.0
    unit_words: bool = False
    factor: float = 1.0

    @property
    def possible(self) -> bool:
        return self.scale <= MAX_SOFTMAX_SCALE or self.method == "chan"


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def obstacle(index: int) -> str | None:
    """Why the kernels cannot run on a CUDA device; None if they can."""
    if not has_triton():
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        needed, actual = (".".join(map(str, number)) for number in (OLDEST_CAPABILITY, capability))
        return f"they need a GPU of compute capability {needed}, this one has {actual}"
    return fault(torch.device("cuda", index))


def fault(device: torch.device) -> str | None:
    """Why Triton does not work (it needs a C compiler and Python's headers); None if it does."""
    mark = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        from counterfoil.kernels.triton.tile_kernels import write_one

        with torch.cuda.device_of(mark):
            write_one[(1,)](mark)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"Triton does not work here ({first}); it needs a C compiler and the headers of Python"
        )
    return None if mark.item() else "Triton's programs do nothing here"


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind can be scored by the kernels."""
    if device.type != "cuda" or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    return obstacle(_index(device)) is None


def shared_memory(device: torch.device) -> float:
    """Bytes of shared memory that a program can have; no limit without CUDA (the interpreter)."""
    return _shared_memory(_index(device)) if device.type == "cuda" else math.inf


@cache
def _shared_memory(index: int) -> int:
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def without_kernels(device: torch.device) -> str | None:
    """A message if PyTorch scores what kernels could score; None if the kernels run."""
    if device.type != "cuda":
        return f"scoring by PyTorch on the {device.type.upper()}"
    why = obstacle(_index(device))
    return why and f"scoring by PyTorch, which is slower than the fused kernels: {why}"


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
