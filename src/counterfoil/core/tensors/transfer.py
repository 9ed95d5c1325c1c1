"""Transfers: batches to another process in one message or to a device in one copy, scores back.

Besides its fragments, a batch has many small tensors: ids, masks, places. Sending each alone costs
more than its contents, so small tensors lie side by side in one buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from itertools import compress
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from counterfoil.core.tensors.host_mirror import attach_host_copy

B = TypeVar("B", bound="TensorBundle")

MAX_PACKED_BYTES = 1 << 18
"""Bytes of a tensor that travels side by side with others; a larger one goes by itself."""

ALIGNMENT_BYTES = 64
"""Bytes to which each begins: kernels read memory in steps of 16, and some are made for that."""

COMPACT_DTYPES = (torch.uint8, torch.float16)
"""How pixels and features travel, in a quarter or half of the size; where they are used they become
as all other numbers are."""

MAX_PENDING_NUMBERS = 1 << 23
"""Numbers of a matrix that are on their way at once."""


class TensorBundle:
    """A dataclass of tensors that go together; parts of it may be such, or dicts of such."""

    def to(self: B, device: torch.device | str) -> B:
        shell, tensors = tree_flatten(self)
        return cast(B, tree_unflatten(shell, iter(moved(tensors, torch.device(device)))))

    def pin_memory(self: B) -> B:
        """Large tensors where a GPU can fetch them; the small ones are copied on the way anyway."""
        shell, tensors = tree_flatten(self)
        pinned = (tensor if packs(tensor) else tensor.pin_memory() for tensor in tensors)
        return cast(B, tree_unflatten(shell, pinned))

    def __reduce__(self) -> tuple[Any, ...]:
        """Small tensors go to another process in the message itself.

        As shared memory, which is how large ones go, each costs a file and a connection.
        """
        shell, tensors = tree_flatten(self)
        large = [None if packs(tensor) else tensor for tensor in tensors]
        small = [tensor for tensor, other in zip(tensors, large, strict=True) if other is None]
        return _received, (shell, large, *pack(small))


def _received(
    shell: Any, large: list[Tensor | None], packed: bytearray, places: list[Place]
) -> TensorBundle:
    memory = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty(0).byte()
    small = iter(unpack(memory, places))
    tensors = (next(small) if tensor is None else tensor for tensor in large)
    return cast(TensorBundle, tree_unflatten(shell, tensors))


class _TreeSpec(NamedTuple):
    """A `TensorBundle` without its tensors."""

    kind: type[TensorBundle]
    parts: tuple[Any, ...]


class _Leaf(Enum):
    """Where a tensor has been."""

    TENSOR = 0


def tree_flatten(value: TensorBundle) -> tuple[Any, list[Tensor]]:
    """The form of something and, in order, its tensors."""
    found: list[Tensor] = []

    def emptied(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
            return _Leaf.TENSOR
        if isinstance(value, TensorBundle):
            parts = (emptied(getattr(value, field.name)) for field in fields(value))  # type: ignore[arg-type]
            return _TreeSpec(type(value), tuple(parts))
        if isinstance(value, dict):
            return {key: emptied(part) for key, part in value.items()}
        return value

    return emptied(value), found


def tree_unflatten(shell: Any, tensors: Iterator[Tensor]) -> Any:
    """What `tree_flatten` took apart, with as many other tensors."""
    if shell is _Leaf.TENSOR:
        return next(tensors)
    if isinstance(shell, _TreeSpec):
        return shell.kind(*[tree_unflatten(part, tensors) for part in shell.parts])
    if isinstance(shell, dict):
        return {key: tree_unflatten(part, tensors) for key, part in shell.items()}
    return shell


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device: the small ones of the host by one copy, of which they are parts there.

    Compact numbers become as others there; masks are remembered here (`host_mirror`).
    """
    to_device = device.type != "cpu"  # the host must not read what has not arrived: it waits
    together = [to_device and packs(tensor) for tensor in tensors]
    there = iter(_sent(list(compress(tensors, together)), device))
    arrived = (
        next(there) if small else tensor.to(device, non_blocking=to_device)
        for tensor, small in zip(tensors, together, strict=True)
    )
    return [_arrived(here, tensor) for here, tensor in zip(tensors, arrived, strict=True)]


def _arrived(sent: Tensor, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool and sent.is_cpu:
        return attach_host_copy(tensor, sent)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype in COMPACT_DTYPES else tensor


def _sent(small: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors as parts of one memory on a device.

    They go by way of memory from which a GPU copies by itself: with any other the host may have to
    wait until all that it asked for before is done.
    """
    if not small:
        return []
    packed, places = pack(small)
    memory = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory.numpy()[:] = packed
    return unpack(memory.to(device, non_blocking=True), places)


class Place(NamedTuple):
    """Where a tensor begins in a memory of several, in bytes, and what it is."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def packs(tensor: Tensor) -> bool:
    """Whether a tensor can lie side by side with others."""
    return (
        tensor.nbytes <= MAX_PACKED_BYTES
        and tensor.is_cpu
        and tensor.dtype != torch.bfloat16
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def pack(tensors: Sequence[Tensor]) -> tuple[bytearray, list[Place]]:
    """The bytes of several tensors, and where to find them."""
    parts: list[Any] = []
    places: list[Place] = []
    begin = 0
    for tensor in tensors:
        size = tensor.nbytes
        gap = -size % ALIGNMENT_BYTES
        parts += (tensor.numpy(), bytes(gap))
        places.append(Place(begin, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        begin += size + gap
    return bytearray().join(parts), places


def unpack(memory: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """The tensors in a memory, none of them copied."""
    seen = {dtype: memory.view(dtype) for dtype in {place.dtype for place in places}}
    return [
        seen[place.dtype].as_strided(
            place.shape, place.strides, place.begin // place.dtype.itemsize
        )
        for place in places
    ]


# From a GPU to the host: blocks on a stream of their own, whole matrices through pinned memory.


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


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device: a new one for every tile would never be given back."""
    return torch.cuda.Stream(device)


def to_cpu(matrix: Tensor) -> Tensor:
    """A matrix in the host's memory; rows arrive in pinned memory while those before are put away.

    Memory that is not pinned is an order of magnitude slower to copy to, and pinning all of it
    would take it from other programs.
    """
    if not matrix.is_cuda or not matrix.numel():
        return matrix.cpu()
    out = torch.empty(matrix.shape, dtype=matrix.dtype)
    coming: deque[tuple[Tensor, Arrival]] = deque()
    rows = max(1, MAX_PENDING_NUMBERS // max(1, matrix.shape[1]))
    for target, part in zip(out.split(rows), matrix.split(rows), strict=True):
        coming.append((target, Arrival(part)))
        if len(coming) > 2:
            done, arrival = coming.popleft()
            done.copy_(arrival.wait())
    for done, arrival in coming:
        done.copy_(arrival.wait())
    return out
