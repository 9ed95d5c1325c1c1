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
    known = _known(mask)
    return mask.cpu().numpy() if known is None else known


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor; a mask that the host knows is known then, too."""
    known, part = _known(tensor), tensor[rows]
    if known is not None:
        setattr(part, NAME, (part._version, known[rows]))
    return part


def surely_whole(mask: Tensor) -> bool:
    """Whether all is real in a mask, as far as the host knows without waiting."""
    known = mask.numpy() if mask.device.type == "cpu" else _known(mask)
    return known is not None and bool(known.all())


def _known(mask: Tensor) -> NDArray[np.bool_] | None:
    version, found = (None, None) if mask.is_inference() else getattr(mask, NAME, (None, None))
    return found if version is not None and version == mask._version else None
