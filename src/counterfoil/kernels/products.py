"""The one large matrix product before a fused kernel, in the precision that the kernel reads."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def product(v: Tensor, u: Tensor, out: Tensor) -> Tensor:
    """Similarities of regions and words, in the precision of ``out``."""
    if out.dtype == v.dtype:
        return torch.mm(v, u.T, out=out)
    if v.is_cuda:
        found: Tensor = torch.ops.aten.mm.dtype_out(v, u.T, out.dtype, out=out)
        return found
    return torch.mm(v.to(out.dtype), u.T.to(out.dtype), out=out)


def widens(device: torch.device) -> bool:
    """Whether a device multiplies halves into single precision; NAAF needs it twice.

    A word counts fully or not at all where a similarity is at the boundary, and its relevance
    divides by what is close to zero: rounded to half, a similarity is fine at one of both alone.
    """
    if device.type != "cuda":
        return True
    return _widens(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _widens(index: int) -> bool:
    ones = torch.ones(16, 16, dtype=torch.float16, device=torch.device("cuda", index))
    out = torch.zeros(16, 16, dtype=torch.float32, device=ones.device)
    try:
        torch.ops.aten.mm.dtype_out(ones, ones, torch.float32, out=out)
    except (AttributeError, NotImplementedError, RuntimeError):  # PyTorch before 2.8
        return False
    return bool((out == 16).all())
