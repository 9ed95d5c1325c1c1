"""Collate items into padded batches of fragments and token ids, with masks and image ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from counterfoil.core.tensors.transfer import TensorBundle
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.dependencies import LinkedIds

NO_IMAGE = -1
"""Index of an extra image that is not in the split."""


@dataclass(frozen=True)
class FragmentSelection:
    """Fragments of an image that augmentation keeps; row ``first`` of the table is its first."""

    first: int
    keep: NDArray[np.bool_]


@dataclass(frozen=True)
class ImageBatch(TensorBundle):
    """Fragments [B, N, D] with mask [B, N] (False: padding) and boxes [B, N, 4] if known.

    If all fragments are resident on the training device (`device_features`), a batch comes without
    them (D is 0): ``table_rows`` [B, N] are the rows to gather there.
    """

    fragments: Tensor
    mask: Tensor
    boxes: Tensor | None = None
    table_rows: Tensor | None = None


@dataclass(frozen=True)
class TextBatch(TensorBundle):
    """Token ids [B, W] with mask [B, W] (False: padding) and word graph [B, W, W] if known."""

    ids: Tensor
    mask: Tensor
    graph: Tensor | None = None


def pad_images(items: Sequence[Fragments | FragmentSelection]) -> ImageBatch:
    """A batch of fragments, or of their rows in the resident table."""
    if isinstance(items[0], FragmentSelection):
        return pad_selections([item for item in items if isinstance(item, FragmentSelection)])
    return pad_fragments([item for item in items if isinstance(item, Fragments)])


def pad_fragments(items: Sequence[Fragments]) -> ImageBatch:
    """A batch; features that are all float16, or all uint8, stay so until `to` moves them."""
    dim = items[0].features.shape[1]
    longest = max(1, max(len(item) for item in items))
    even = all(len(item) == longest for item in items)
    features = _batch_memory((len(items), longest, dim), _common_type(items))
    if not even:
        features.zero_()
    mask = torch.full((len(items), longest), even)
    boxed = all(item.boxes is not None for item in items)
    boxes = torch.zeros(len(items), longest, 4) if boxed else None
    rows, real = features.numpy(), mask.numpy()  # NumPy assigns small slices faster than torch
    for row, item in enumerate(items):
        rows[row, : len(item)] = item.features
        real[row, : len(item)] = True
        if boxes is not None and item.boxes is not None:
            boxes[row, : len(item)] = torch.from_numpy(item.boxes)
    return ImageBatch(features, mask, boxes)


def pad_selections(items: Sequence[FragmentSelection]) -> ImageBatch:
    """A batch of images whose fragments are resident on the training device."""
    stored = _length_mask(np.array([len(item.keep) for item in items]))
    keep: NDArray[np.bool_] = np.zeros(stored.shape, dtype=np.bool_)
    keep[stored] = np.concatenate([item.keep for item in items])
    mask = _length_mask(keep.sum(1))
    first = np.array([item.first for item in items], dtype=np.int32)[:, None]
    table_rows = np.zeros(mask.shape, dtype=np.int32)
    table_rows[mask] = (first + np.arange(keep.shape[1], dtype=np.int32))[keep]
    absent = torch.empty(*mask.shape, 0)
    return ImageBatch(absent, torch.from_numpy(mask), None, torch.from_numpy(table_rows))


def _length_mask(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask [B, N] of rows with these lengths; at least one column."""
    mask: NDArray[np.bool_] = np.arange(max(1, int(lengths.max()))) < lengths[:, None]
    return mask


def _common_type(items: Sequence[Fragments]) -> torch.dtype:
    types = {item.features.dtype for item in items}
    if types == {np.dtype(np.uint8)}:
        return torch.uint8
    return torch.float16 if types == {np.dtype(np.float16)} else torch.get_default_dtype()


def _batch_memory(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory; in a loader worker shared with the main process, which saves a copy."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=dtype).set_(memory).view(shape)


def pad_texts(items: Sequence[Sequence[int]], pad: int) -> TextBatch:
    lengths = [len(item) for item in items]
    longest = max(lengths)
    mask = np.arange(longest) < np.array(lengths)[:, None]
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(items), np.int64, sum(lengths))
    return TextBatch(torch.from_numpy(ids), torch.from_numpy(mask), _word_graph(items, longest))


def _word_graph(items: Sequence[Sequence[int]], longest: int) -> Tensor | None:
    """Symmetric adjacency [B, longest, longest]; None unless every caption was parsed."""
    if not all(isinstance(item, LinkedIds) for item in items):
        return None
    graph = torch.zeros(len(items), longest, longest, dtype=torch.bool)
    for row, item in enumerate(items):
        if isinstance(item, LinkedIds) and item.edges:
            start, end = torch.tensor(item.edges).T
            graph[row, start, end] = graph[row, end, start] = True
    return graph


@dataclass(frozen=True)
class BatchExtras(TensorBundle):
    """Extra images and texts that one objective adds to the pairs of a batch.

    Extra image ``e`` belongs to pair ``image_owners[e]`` of the batch, extra text ``e`` to pair
    ``text_owners[e]``. The extras of a pair keep the order of their source. ``image_ids`` are
    indices into the split, `NO_IMAGE` for images outside it.
    """

    images: ImageBatch | None
    image_owners: Tensor
    texts: TextBatch | None
    text_owners: Tensor
    image_ids: Tensor


@dataclass(frozen=True)
class PairBatch(TensorBundle):
    """Images and captions; equal image ids are positives.

    ``image_ids`` are those of the images, ``owners`` the image id of each caption. In a batch of
    pairs caption ``k`` belongs to image ``k``, and the two are equal. In a grouped batch each image
    comes once, with all its captions. ``extras`` has the extra items by objective name.
    """

    images: ImageBatch
    texts: TextBatch
    image_ids: Tensor
    caption_ids: Tensor
    owners: Tensor
    skipped: tuple[str, ...] = ()
    extras: dict[str, BatchExtras] = field(default_factory=dict)


class ItemExtras(NamedTuple):
    """What one objective adds to an item: images with their indices in the split, and texts."""

    images: list[Fragments | FragmentSelection]
    texts: list[list[int]]
    image_ids: list[int]


@dataclass(frozen=True)
class Item:
    """A caption with its image; ``fragments`` is None if the image is in the batch already."""

    fragments: Fragments | FragmentSelection | None
    ids: list[int]
    image: int
    caption: int
    extras: dict[str, ItemExtras] = field(default_factory=dict)


class Collate:
    """Collates items into a `PairBatch`; picklable, for loader workers."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, items: Sequence[Item | str]) -> PairBatch | tuple[str, ...]:
        skipped = tuple(item for item in items if isinstance(item, str))
        good = [item for item in items if not isinstance(item, str)]
        readable = {item.image for item in good if item.fragments is not None}
        good = [item for item in good if item.image in readable]  # a caption needs its image
        if not good:
            return skipped
        pictures = [item for item in good if item.fragments is not None]
        return PairBatch(
            pad_images([item.fragments for item in pictures if item.fragments is not None]),
            pad_texts([item.ids for item in good], self.pad),
            _numbers([item.image for item in pictures]),
            _numbers([item.caption for item in good]),
            _numbers([item.image for item in good]),
            skipped,
            {name: self._extras(good, name) for name in good[0].extras},
        )

    def _extras(self, items: Sequence[Item], name: str) -> BatchExtras:
        images = [(row, x) for row, item in enumerate(items) for x in item.extras[name].images]
        texts = [(row, x) for row, item in enumerate(items) for x in item.extras[name].texts]
        return BatchExtras(
            pad_images([x for _, x in images]) if images else None,
            _numbers([row for row, _ in images]),
            pad_texts([x for _, x in texts], self.pad) if texts else None,
            _numbers([row for row, _ in texts]),
            _numbers([image for item in items for image in item.extras[name].image_ids]),
        )


def _numbers(values: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
