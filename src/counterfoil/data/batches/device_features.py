"""Training features kept on the device, where there is room for them.

For Flickr30K they are 4.3 GB in half precision. Read once, a batch then takes its fragments by one
gather on the device; what travels from the processes that read ahead is captions and places.
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
from counterfoil.data.batches.collate import ExtraBatch, ImageBatch, PairBatch
from counterfoil.data.fragments import FragmentTable

COPY_TASK = "features to the device"

CHUNK, READERS = 256, 4
"""Images read at a time, and by how many threads."""


@dataclass(frozen=True)
class ResidentFragments:
    """All fragments of a split on a device, as many rows for each image as the widest has.

    ``good`` says which images can be used; the others hold what is not a number.
    """

    features: Tensor
    boxes: Tensor | None
    good: NDArray[np.bool_]

    def filled(self, batch: PairBatch) -> PairBatch:
        """A batch with the fragments that it travelled without."""
        extras = {name: self._extra(extra) for name, extra in batch.extras.items()}
        return replace(batch, images=self.take(batch.images), extras=extras)

    def _extra(self, extra: ExtraBatch) -> ExtraBatch:
        return extra if extra.images is None else replace(extra, images=self.take(extra.images))

    def take(self, images: ImageBatch) -> ImageBatch:
        if images.places is None:
            return images
        places = images.places.flatten()
        whole = bool(host_mask(images.mask).all())

        def taken(table: Tensor) -> Tensor:
            found = table.index_select(0, places).to(torch.get_default_dtype())
            found = found.view(*images.mask.shape, -1)
            return found if whole else found.masked_fill(~images.mask[..., None], 0.0)

        boxes = None if self.boxes is None else taken(self.boxes)
        return ImageBatch(taken(self.features), images.mask, boxes)


def features_on_device(
    table: FragmentTable | None, wanted: bool | None, device: torch.device, progress: Progress
) -> ResidentFragments | None:
    """The fragments on a device, if that is ``wanted``; None: where it is a GPU with room."""
    if wanted is False or type(table) is not FragmentTable or not len(table):
        return None
    size = len(table) * table.max_fragments * table.dim * _kept_as(table).itemsize
    if wanted is None and not room_for(size, device):
        return None
    return copied(table, device, progress)


def copied(table: FragmentTable, device: torch.device, progress: Progress) -> ResidentFragments:
    shape = (len(table), table.max_fragments)
    features = torch.empty(*shape, table.dim, dtype=_kept_as(table), device=device)
    boxes = torch.empty(*shape, 4, device=device) if table.boxes is not None else None
    good = np.zeros(len(table), dtype=bool)
    spans = [range(first, min(first + CHUNK, len(table))) for first in range(0, len(table), CHUNK)]
    with ThreadPoolExecutor(READERS) as pool:
        for span in progress.track(spans, COPY_TASK, len(spans)):
            rows = slice(span.start, span.stop)
            read = _Read(table, span)
            good[rows] = list(pool.map(read.one, range(len(span))))
            features[rows] = torch.from_numpy(read.features).to(device)
            if boxes is not None:
                boxes[rows] = torch.from_numpy(read.boxes).to(device)
    flat = None if boxes is None else boxes.flatten(0, 1)
    return ResidentFragments(features.flatten(0, 1), flat, good)


def _kept_as(table: FragmentTable) -> torch.dtype:
    return torch.float16 if table.features.dtype == np.float16 else torch.float32


class _Read:
    """Features and boxes of some images; zero beyond what an image has."""

    def __init__(self, table: FragmentTable, images: range) -> None:
        self.table, self.images = table, images
        shape = (len(images), table.max_fragments)
        dtype = np.float16 if _kept_as(table) == torch.float16 else np.float32
        self.features: NDArray[np.floating] = np.zeros((*shape, table.dim), dtype=dtype)
        self.boxes = np.zeros((*shape, 4), dtype=np.float32)

    def one(self, place: int) -> bool:
        """Read an image; False where that cannot be, which its first use in training tells."""
        try:
            found = self.table.compact(self.images[place])
        except DataError:
            return False
        self.features[place, : len(found)] = found.features
        if found.boxes is not None:
            self.boxes[place, : len(found)] = found.boxes
        return True
