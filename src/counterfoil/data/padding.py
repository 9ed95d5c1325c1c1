"""Fragments and words of several items as padded tensors, and their way to a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from counterfoil.data.fragments import Fragments
from counterfoil.data.on_host import remember
from counterfoil.data.parsing import LinkedIds

B = TypeVar("B", bound="Movable")


@dataclass(frozen=True)
class Kept:
    """The rows of a table that hold what is kept of an image's fragments."""

    places: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.places)


class Movable:
    """Moves every tensor of a dataclass at once."""

    def to(self: B, device: torch.device | str) -> B:
        return self._each(lambda tensor: _arrived(tensor, tensor.to(device, non_blocking=True)))

    def pin_memory(self: B) -> B:
        return self._each(lambda tensor: tensor.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        """Small tensors go to another process in the message itself.

        As shared memory, which is how large ones go, each costs a file and a connection.
        """
        values = {f.name: _written(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return _read_back, (type(self), values)

    def _each(self: B, change: Callable[[Tensor], Tensor]) -> B:
        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, Movable):
                return value._each(change)
            if isinstance(value, dict):
                return {key: changed(part) for key, part in value.items()}
            return value

        values = {f.name: changed(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **values)  # type: ignore[type-var]


@dataclass(frozen=True)
class _Written:
    """A tensor's numbers, as a message has them."""

    numbers: NDArray[Any]


def _written(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype == torch.bfloat16 or value.requires_grad:
        return value
    if value.device.type != "cpu" or value.nbytes > LARGEST_MESSAGE:
        return value
    return _Written(value.numpy())


def _read_back(kind: type[B], values: dict[str, Any]) -> B:
    return kind(
        **{
            name: torch.from_numpy(value.numbers) if isinstance(value, _Written) else value
            for name, value in values.items()
        }
    )


LARGEST_MESSAGE = 1 << 18
"""Bytes of a tensor that goes to another process in a message."""

COMPACT = (torch.uint8, torch.float16)
"""How pixels and features travel, in a quarter or half of the size; where they are used they become
as all other numbers are."""


def _arrived(sent: Tensor, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool and sent.device.type == "cpu":
        return remember(tensor, sent)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype in COMPACT else tensor


@dataclass(frozen=True)
class ImageBatch(Movable):
    """Fragments [B, N, D] with mask [B, N] (True: real) and boxes [B, N, 4] where known.

    Where the training device holds all fragments (`training.resident`), a batch travels without
    them (D is 0) and says by ``places`` [B, N] which rows it wants.
    """

    fragments: Tensor
    mask: Tensor
    boxes: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True)
class TextBatch(Movable):
    """Token ids [B, W] with mask [B, W] (True: real) and graph [B, W, W] of links where known."""

    ids: Tensor
    mask: Tensor
    graph: Tensor | None = None


def pad_images(items: Sequence[Fragments | Kept]) -> ImageBatch:
    """A batch of fragments, or of places where they are."""
    if isinstance(items[0], Kept):
        return pad_places([item for item in items if isinstance(item, Kept)])
    return pad_fragments([item for item in items if isinstance(item, Fragments)])


def pad_fragments(items: Sequence[Fragments]) -> ImageBatch:
    """A batch; features that are all of one compact type stay so until they are moved (`to`)."""
    dim = items[0].features.shape[1]
    longest = max(1, max(len(item) for item in items))
    even = all(len(item) == longest for item in items)
    features = _batch_memory((len(items), longest, dim), _common_type(items))
    if not even:
        features.zero_()
    mask = torch.full((len(items), longest), even)
    boxed = all(item.boxes is not None for item in items)
    boxes = torch.zeros(len(items), longest, 4) if boxed else None
    rows, real = features.numpy(), mask.numpy()  # assigning is faster there
    for row, item in enumerate(items):
        rows[row, : len(item)] = item.features
        real[row, : len(item)] = True
        if boxes is not None and item.boxes is not None:
            boxes[row, : len(item)] = torch.from_numpy(item.boxes)
    return ImageBatch(features, mask, boxes)


def pad_places(items: Sequence[Kept]) -> ImageBatch:
    """A batch of images whose fragments are elsewhere."""
    longest = max(1, max(len(item) for item in items))
    mask = np.arange(longest) < np.array([len(item) for item in items])[:, None]
    places = np.zeros(mask.shape, dtype=np.int32)
    places[mask] = np.concatenate([item.places for item in items])
    absent = torch.empty(*mask.shape, 0)
    return ImageBatch(absent, torch.from_numpy(mask), None, torch.from_numpy(places))


def _common_type(items: Sequence[Fragments]) -> torch.dtype:
    types = {item.features.dtype for item in items}
    if types == {np.dtype(np.uint8)}:
        return torch.uint8
    return torch.float16 if types == {np.dtype(np.float16)} else torch.get_default_dtype()


def _batch_memory(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Uninitialised; in a loader's worker what it shares with the main process, as it would
    otherwise be copied there."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=dtype).set_(memory).view(shape)


def pad_texts(items: Sequence[Sequence[int]], pad: int) -> TextBatch:
    lengths = np.array([len(item) for item in items])
    longest = int(lengths.max())
    mask = np.arange(longest) < lengths[:, None]
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(items), np.int64, int(lengths.sum()))
    return TextBatch(torch.from_numpy(ids), torch.from_numpy(mask), _word_graph(items, longest))


def _word_graph(items: Sequence[Sequence[int]], longest: int) -> Tensor | None:
    """Links [B, longest, longest], each both ways; None unless every caption was parsed."""
    if not all(isinstance(item, LinkedIds) for item in items):
        return None
    graph = torch.zeros(len(items), longest, longest, dtype=torch.bool)
    for row, item in enumerate(items):
        if isinstance(item, LinkedIds) and item.edges:
            start, end = torch.tensor(item.edges).T
            graph[row, start, end] = graph[row, end, start] = True
    return graph
