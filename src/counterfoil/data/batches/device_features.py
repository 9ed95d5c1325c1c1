"""Training features resident on the GPU if they fit into its memory.

For Flickr30K they take 4.3 GB as float16. They are copied once; a batch then gathers its fragments
on the device, and loader workers send only captions and row numbers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress
from counterfoil.core.tensors.device import room_for
from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.data.batches.collate import BatchExtras, ImageBatch, PairBatch
from counterfoil.data.fragments import FragmentTable

COPY_TASK = "features to the device"

CHUNK, READERS = 256, 4
"""Images copied at a time, and threads that read them."""


@dataclass(frozen=True)
class ResidentFragments:
    """All fragments of a split on a device: R rows per image [images × R, D], zero-padded.

    ``usable`` [images] is False for images that could not be read.
    """

    features: Tensor
    boxes: Tensor | None
    usable: NDArray[np.bool_]

    def fill(self, batch: PairBatch) -> PairBatch:
        """The batch with its fragments, and those of its extras, gathered."""
        extras = {name: self._extra(extra) for name, extra in batch.extras.items()}
        return replace(batch, images=self.take(batch.images), extras=extras)

    def _extra(self, extra: BatchExtras) -> BatchExtras:
        return extra if extra.images is None else replace(extra, images=self.take(extra.images))

    def take(self, images: ImageBatch) -> ImageBatch:
        if images.table_rows is None:
            return images
        rows = images.table_rows.flatten()
        whole = bool(host_mask(images.mask).all())

        def gather(table: Tensor) -> Tensor:
            values = table.index_select(0, rows).to(torch.get_default_dtype())
            values = values.view(*images.mask.shape, -1)
            return values if whole else values.masked_fill(~images.mask[..., None], 0.0)

        boxes = None if self.boxes is None else gather(self.boxes)
        return ImageBatch(gather(self.features), images.mask, boxes)


def features_on_device(
    table: FragmentTable | None, wanted: bool | None, device: torch.device, progress: Progress
) -> ResidentFragments | None:
    """The fragments on a device if ``wanted`` (None: if it is a GPU with enough free memory)."""
    if wanted is False or type(table) is not FragmentTable or not len(table):
        return None
    size = len(table) * table.max_fragments * table.dim * _stored_dtype(table).itemsize
    if wanted is None and not room_for(size, device):
        return None
    return copy_to_device(table, device, progress)


def copy_to_device(
    table: FragmentTable, device: torch.device, progress: Progress
) -> ResidentFragments:
    shape = (len(table), table.max_fragments)
    features = torch.empty(*shape, table.dim, dtype=_stored_dtype(table), device=device)
    boxes = torch.empty(*shape, 4, device=device) if table.boxes is not None else None
    usable = np.zeros(len(table), dtype=bool)
    spans = [range(first, min(first + CHUNK, len(table))) for first in range(0, len(table), CHUNK)]
    with ThreadPoolExecutor(READERS) as pool:
        for span in progress.track(spans, COPY_TASK, len(spans)):
            rows = slice(span.start, span.stop)
            chunk = _Chunk(table, span)
            usable[rows] = list(pool.map(chunk.read, range(len(span))))
            features[rows] = torch.from_numpy(chunk.features).to(device)
            if boxes is not None:
                boxes[rows] = torch.from_numpy(chunk.boxes).to(device)
    flat = None if boxes is None else boxes.flatten(0, 1)
    return ResidentFragments(features.flatten(0, 1), flat, usable)


def _stored_dtype(table: FragmentTable) -> torch.dtype:
    return torch.float16 if table.features.dtype == np.float16 else torch.float32


class _Chunk:
    """Zero-padded features and boxes of consecutive images."""

    def __init__(self, table: FragmentTable, images: range) -> None:
        self.table, self.images = table, images
        shape = (len(images), table.max_fragments)
        dtype = np.float16 if _stored_dtype(table) == torch.float16 else np.float32
        self.features: NDArray[np.floating] = np.zeros((*shape, table.dim), dtype=dtype)
        self.boxes = np.zeros((*shape, 4), dtype=np.float32)

    def read(self, index: int) -> bool:
        """Read an image; False if that fails. Training reports it when it first needs the image."""
        try:
            fragments = self.table.compact(self.images[index])
        except DataError:
            return False
        self.features[index, : len(fragments)] = fragments.features
        if fragments.boxes is not None:
            self.boxes[index, : len(fragments)] = fragments.boxes
        return True
