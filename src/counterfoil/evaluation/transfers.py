"""From a GPU to the host: blocks on a stream of their own, whole matrices through pinned memory."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

STAGED = 1 << 23
"""Numbers of a matrix that are on their way at once."""


class Arrival:
    """A block on its way to the host: by a stream of its own into pinned memory, from a GPU."""

    def __init__(self, block: Tensor) -> None:
        self.host, self.event = block, None
        if not block.is_cuda:
            return
        stream = _side_stream(block.device)
        stream.wait_stream(torch.cuda.current_stream(block.device))
        self.host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            self.host.copy_(block, non_blocking=True)
            block.record_stream(stream)
            self.event = stream.record_event()

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device: a new one for every tile would never be given back."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def to_host(matrix: Tensor) -> Tensor:
    """A matrix in the host's memory; rows arrive in pinned memory while those before are put away.

    Memory that is not pinned is an order of magnitude slower to copy to, and pinning all of it
    would take it from other programs.
    """
    if not matrix.is_cuda or not matrix.numel():
        return matrix.cpu()
    out = torch.empty(matrix.shape, dtype=matrix.dtype)
    coming: deque[tuple[Tensor, Arrival]] = deque()
    rows = max(1, STAGED // max(1, matrix.shape[1]))
    for target, part in zip(out.split(rows), matrix.split(rows), strict=True):
        coming.append((target, Arrival(part)))
        if len(coming) > 2:
            done, arrival = coming.popleft()
            done.copy_(arrival.wait())
    for done, arrival in coming:
        done.copy_(arrival.wait())
    return out
