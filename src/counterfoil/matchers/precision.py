"""Final scores in single precision, also where a run is in mixed precision.

bfloat16 keeps 8 bits: two scores near 1 differ by 0.004 or not at all, so that pairs tie at the top
of a ranking, and a model whose vectors are all alike could not learn to tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from counterfoil.encoders.encoded import HALVES, Encoded


@contextmanager
def single_precision(device: torch.device) -> Iterator[bool]:
    """Inside, nothing is cast to half precision by autocast; gives whether it was enabled."""
    if not torch.is_autocast_enabled(device.type):
        yield False
        return
    with torch.autocast(device.type, enabled=False):
        yield True


def single(x: Tensor) -> Tensor:
    """In single precision what is in half; double precision stays as it is."""
    return x.float() if x.dtype in HALVES else x


def single_fragments(encoded: Encoded) -> Encoded:
    """The same with fragments and pooled vectors in single precision."""
    fragments, pooled = encoded.fragments, encoded.pooled
    return replace(
        encoded,
        fragments=None if fragments is None else single(fragments),
        pooled=None if pooled is None else single(pooled),
    )
