"""Host copies of small GPU tensors, so that reading them needs no device sync.

A batch is padded on the host, so its masks are known there before the transfer. Recurrent networks
and kernels read the lengths of captions from these copies.
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


def attach_host_copy(mask: Tensor, host: Tensor) -> Tensor:
    """Attach its copy on the host to a mask that was moved to a device."""
    if mask is not host and not mask.is_inference():
        setattr(mask, MIRROR_ATTRIBUTE, (mask._version, host.numpy()))
    return mask


def host_mask(mask: Tensor) -> NDArray[np.bool_]:
    """The mask as an array; no device sync if it has a valid host copy."""
    copy = _host_copy(mask)
    return mask.cpu().numpy() if copy is None else copy


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor, with those of its host copy."""
    copy, part = _host_copy(tensor), tensor[rows]
    if copy is not None:
        setattr(part, MIRROR_ATTRIBUTE, (part._version, copy[rows]))
    return part


def known_unpadded(mask: Tensor) -> bool:
    """Whether the host knows, without a device sync, that a mask has no padding."""
    if is_exporting():  # the exported graph must be valid for any mask
        return False
    copy = mask.numpy() if mask.device.type == "cpu" else _host_copy(mask)
    return copy is not None and bool(copy.all())


def _host_copy(mask: Tensor) -> NDArray[np.bool_] | None:
    """The host copy of a mask; None without one, or if the mask changed since."""
    if mask.is_inference():
        return None
    version, copy = getattr(mask, MIRROR_ATTRIBUTE, (None, None))
    return copy if version == mask._version else None


class HostScalarCache:
    """Host-side values of scalar tensors, read again when a tensor's version changes."""

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._numbers: list[float] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts empty, as the versions of its tensors start anew."""
        return vars(HostScalarCache())

    def read(self, *tensors: Tensor) -> list[float]:
        """Values of scalar tensors; a GPU is synced only after a change."""
        if any(tensor.is_inference() for tensor in tensors):  # inference tensors have no version
            return [float(tensor) for tensor in tensors]
        same = len(tensors) == len(self._tensors) and all(
            new is old for new, old in zip(tensors, self._tensors, strict=True)
        )
        if not same or [tensor._version for tensor in tensors] != self._versions:
            self.store(torch.stack([tensor.double() for tensor in tensors]).tolist(), *tensors)
        return self._numbers

    def store(self, numbers: list[float], *tensors: Tensor) -> None:
        """Cache values that the caller has just written to these tensors."""
        if not any(tensor.is_inference() for tensor in tensors):
            self._tensors, self._numbers = tensors, numbers
            self._versions = [tensor._version for tensor in tensors]


@dataclass(frozen=True)
class PendingCopy:
    """An asynchronous copy to the host, started after a batch of an epoch."""

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
