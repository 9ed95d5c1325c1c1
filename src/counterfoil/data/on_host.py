"""Masks that the host knows, too, where they are on a GPU: to read one back, it would have to wait.

A batch is padded on the host, so what is real in it is known there before anything is moved. What
needs the lengths of captions on the host (packing, for a recurrent network or a kernel) asks here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NAME = "_counterfoil_on_host"


def remember(there: Tensor, here: Tensor) -> Tensor:
    """A mask that has been moved, which from now on knows what it says."""
    if there is not here and not there.is_inference():
        setattr(there, NAME, (there._version, here.numpy()))
    return there


def on_host(mask: Tensor) -> NDArray[np.bool_]:
    """What a mask says; without waiting where it has been moved by `remember` and not changed."""
    known = None if mask.is_inference() else getattr(mask, NAME, None)
    if known is not None and known[0] == mask._version:
        found: NDArray[np.bool_] = known[1]
        return found
    return mask.cpu().numpy()
