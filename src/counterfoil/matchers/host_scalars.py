"""Host-side copies of small GPU tensors, so that a training step needs no device sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
