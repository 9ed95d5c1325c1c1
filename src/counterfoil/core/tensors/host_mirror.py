"""Host copies of small GPU tensors, so that reading them needs no device sync.

A batch is padded on the host, so its masks are known there before anything is moved. Packing, for a
recurrent network or a kernel, takes the lengths of captions from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.tensors.modes import is_exporting

MIRROR_ATTRIBUTE = "_counterfoil_on_host"


def attach_host_copy(there: Tensor, here: Tensor) -> Tensor:
    """A mask that has been moved, which from now on knows what it says."""
    if there is not here and not there.is_inference():
        setattr(there, MIRROR_ATTRIBUTE, (there._version, here.numpy()))
    return there


def host_mask(mask: Tensor) -> NDArray[np.bool_]:
    """The mask as an array; no device sync if `attach_host_copy` moved it and it is unchanged."""
    known = _known(mask)
    return mask.cpu().numpy() if known is None else known


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor; a mask that the host knows is known then, too."""
    known, part = _known(tensor), tensor[rows]
    if known is not None:
        setattr(part, MIRROR_ATTRIBUTE, (part._version, known[rows]))
    return part


def known_unpadded(mask: Tensor) -> bool:
    """Whether all is real in a mask, as far as the host knows without waiting."""
    if is_exporting():  # the graph has to hold for any mask
        return False
    known = mask.numpy() if mask.device.type == "cpu" else _known(mask)
    return known is not None and bool(known.all())


def _known(mask: Tensor) -> NDArray[np.bool_] | None:
    version, found = (
        (None, None) if mask.is_inference() else getattr(mask, MIRROR_ATTRIBUTE, (None, None))
    )
    return found if version is not None and version == mask._version else None


class HostScalarCache:
    """Host-side values of scalar tensors, read again when a tensor's version changes."""

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._numbers: list[float] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts empty: its tensors count their versions anew."""
        return vars(HostScalarCache())

    def read(self, *tensors: Tensor) -> list[float]:
        """Values of scalar tensors; from a GPU they are read once, not once per batch."""
        if any(tensor.is_inference() for tensor in tensors):  # these have no version
            return [float(tensor) for tensor in tensors]
        same = len(tensors) == len(self._tensors) and all(
            new is old for new, old in zip(tensors, self._tensors, strict=True)
        )
        if not same or [tensor._version for tensor in tensors] != self._versions:
            self.store(torch.stack([tensor.double() for tensor in tensors]).tolist(), *tensors)
        return self._numbers

    def store(self, numbers: list[float], *tensors: Tensor) -> None:
        """Values that the caller has just written to these tensors."""
        if not any(tensor.is_inference() for tensor in tensors):
            self._tensors, self._numbers = tensors, numbers
            self._versions = [tensor._version for tensor in tensors]


@dataclass(frozen=True)
class PendingCopy:
    """A copy to the host that was started after a batch of some epoch and may not be complete."""

    values: Tensor
    done: torch.cuda.Event | None
    epoch: int

    @classmethod
    def start(cls, tensor: Tensor, epoch: int) -> PendingCopy:
        if not tensor.is_cuda:
            return cls(tensor.clone(), None, epoch)
        values = tensor.to("cpu", non_blocking=True)
        return cls(values, torch.cuda.current_stream(tensor.device).record_event(), epoch)

    def wait(self) -> list[list[float]]:
        if self.done is not None:
            self.done.synchronize()
        rows: list[list[float]] = self.values.tolist()
        return rows
