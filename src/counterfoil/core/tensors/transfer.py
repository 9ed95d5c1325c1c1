"""Transfers of batches to other processes and to devices, and of score matrices to the host.

Besides its fragments, a batch has many small tensors: ids, masks, positions. A separate transfer
of each costs more than its contents, so small tensors are packed into one buffer.
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
"""Largest tensor that is packed with others; a larger one is sent separately."""

ALIGNMENT_BYTES = 64
"""Alignment of each tensor in the buffer; some kernels read in steps of 16 bytes."""

COMPACT_DTYPES = (torch.uint8, torch.float16)
"""Dtypes in which pixels and features are sent; they become the default dtype on arrival."""

MAX_PENDING_NUMBERS = 1 << 23
"""Numbers of a matrix per asynchronous copy."""


class TensorBundle:
    """A dataclass of tensors; its fields may also be bundles, or dicts of them."""

    def to(self: B, device: torch.device | str) -> B:
        shell, tensors = tree_flatten(self)
        return cast(B, tree_unflatten(shell, iter(moved(tensors, torch.device(device)))))

    def pin_memory(self: B) -> B:
        """Pin large tensors; small ones are copied to a pinned buffer anyway."""
        shell, tensors = tree_flatten(self)
        pinned = (tensor if packs(tensor) else tensor.pin_memory() for tensor in tensors)
        return cast(B, tree_unflatten(shell, pinned))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send small tensors to another process within the message.

        Large ones go through shared memory, which costs a file and a connection each.
        """
        shell, tensors = tree_flatten(self)
        large = [None if packs(tensor) else tensor for tensor in tensors]
        small = [tensor for tensor, other in zip(tensors, large, strict=True) if other is None]
        return _rebuild, (shell, large, *pack(small))


def _rebuild(
    shell: Any, large: list[Tensor | None], packed: bytearray, slots: list[Slot]
) -> TensorBundle:
    memory = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty(0).byte()
    small = iter(unpack(memory, slots))
    tensors = (next(small) if tensor is None else tensor for tensor in large)
    return cast(TensorBundle, tree_unflatten(shell, tensors))


class _TreeSpec(NamedTuple):
    """A `TensorBundle` without its tensors."""

    kind: type[TensorBundle]
    parts: tuple[Any, ...]


class _Leaf(Enum):
    """Marks the position of a tensor in a `_TreeSpec`."""

    TENSOR = 0


def tree_flatten(value: TensorBundle) -> tuple[Any, list[Tensor]]:
    """The structure of a bundle and, in order, its tensors."""
    tensors: list[Tensor] = []

    def without_tensors(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return _Leaf.TENSOR
        if isinstance(value, TensorBundle):
            parts = (without_tensors(getattr(value, field.name)) for field in fields(value))  # type: ignore[arg-type]
            return _TreeSpec(type(value), tuple(parts))
        if isinstance(value, dict):
            return {key: without_tensors(part) for key, part in value.items()}
        return value

    return without_tensors(value), tensors


def tree_unflatten(shell: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of `tree_flatten`."""
    if shell is _Leaf.TENSOR:
        return next(tensors)
    if isinstance(shell, _TreeSpec):
        return shell.kind(*[tree_unflatten(part, tensors) for part in shell.parts])
    if isinstance(shell, dict):
        return {key: tree_unflatten(part, tensors) for key, part in shell.items()}
    return shell


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device; the small ones of the host become views of one copied buffer.

    Compact dtypes become the default dtype; masks get a host copy (`host_mirror`).
    """
    to_device = device.type != "cpu"  # copies to the host block, as the host reads them at once
    is_small = [to_device and packs(tensor) for tensor in tensors]
    packed = iter(_copy_packed(list(compress(tensors, is_small)), device))
    copies = (
        next(packed) if small else tensor.to(device, non_blocking=to_device)
        for tensor, small in zip(tensors, is_small, strict=True)
    )
    return [_finish(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True)]


def _finish(tensor: Tensor, copy: Tensor) -> Tensor:
    if copy.dtype == torch.bool and tensor.is_cpu:
        return attach_host_copy(copy, tensor)
    return copy.to(torch.get_default_dtype()) if copy.dtype in COMPACT_DTYPES else copy


def _copy_packed(small: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of small tensors, as views of one buffer on a device.

    The buffer on the host is pinned: a copy from other memory may wait for the GPU.
    """
    if not small:
        return []
    packed, slots = pack(small)
    memory = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory.numpy()[:] = packed
    return unpack(memory.to(device, non_blocking=True), slots)


class Slot(NamedTuple):
    """Offset in bytes, dtype, shape and strides of a tensor in a buffer."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def packs(tensor: Tensor) -> bool:
    """Whether a tensor can be packed with others."""
    return (
        tensor.nbytes <= MAX_PACKED_BYTES
        and tensor.is_cpu
        and tensor.dtype != torch.bfloat16
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def pack(tensors: Sequence[Tensor]) -> tuple[bytearray, list[Slot]]:
    """A buffer with the bytes of several tensors, and their slots."""
    parts: list[Any] = []
    slots: list[Slot] = []
    begin = 0
    for tensor in tensors:
        size = tensor.nbytes
        gap = -size % ALIGNMENT_BYTES
        parts += (tensor.numpy(), bytes(gap))
        slots.append(Slot(begin, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        begin += size + gap
    return bytearray().join(parts), slots


def unpack(memory: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """The tensors in a buffer, as views."""
    views = {dtype: memory.view(dtype) for dtype in {slot.dtype for slot in slots}}
    return [
        views[slot.dtype].as_strided(slot.shape, slot.strides, slot.begin // slot.dtype.itemsize)
        for slot in slots
    ]


class Arrival:
    """An asynchronous copy of a block from a GPU to pinned memory, on a separate stream."""

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
    """One stream per device; streams are never freed."""
    return torch.cuda.Stream(device)


def to_cpu(matrix: Tensor) -> Tensor:
    """A matrix on the host, copied block by block through pinned memory.

    Copies to pageable memory are an order of magnitude slower, and pinning all of a large matrix
    would take memory from other programs.
    """
    if not matrix.is_cuda or not matrix.numel():
        return matrix.cpu()
    out = torch.empty(matrix.shape, dtype=matrix.dtype)
    pending: deque[tuple[Tensor, Arrival]] = deque()
    rows = max(1, MAX_PENDING_NUMBERS // max(1, matrix.shape[1]))
    for target, part in zip(out.split(rows), matrix.split(rows), strict=True):
        pending.append((target, Arrival(part)))
        if len(pending) > 2:
            ready, arrival = pending.popleft()
            ready.copy_(arrival.wait())
    for ready, arrival in pending:
        ready.copy_(arrival.wait())
    return out
