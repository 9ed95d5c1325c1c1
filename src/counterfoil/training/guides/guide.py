"""A guide in use: what several trained runs think of any image with any caption of the data.

NDGL's target matrix Ŝ (Eq. 3) is the mean of the teachers' scores over the whole training split.
It is never held: of the form `matrix` only the rows of a batch are read, and with the form
`embeddings` the teachers' matchers score the batch anew, from encodings that are read from disk or
kept on the training device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.distributed import gather_rows, rank, world_size
from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.tensors.device import room_for
from counterfoil.core.tensors.host_mirror import attach_host_copy
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.encoders.stored import EncodedReader, full_precision
from counterfoil.matchers import Matcher
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.models.store import from_pretrained
from counterfoil.training.guides.manifest import (
    Manifest,
    difference,
    read_manifest,
    side_name,
    teacher_folder,
    weights_digest,
)

COPY_ROWS = 1 << 16
"""Rows copied to the device at a time."""

MATRIX, MODEL = "scores.npy", "model"
Indices = NDArray[np.int64]


# For Flickr30K they take 6 GB a teacher in half precision: read once, a batch then costs a gather
# instead of hundreds of reads and a copy. Where there is no room, or on a CPU, where the system
# keeps what was read anyway, every batch is read from disk.
@dataclass(frozen=True)
class ResidentItems:
    """All items of one side of a teacher, packed, on a device; where they stand, the host knows."""

    numbers: dict[str, Tensor]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    present: NDArray[np.int64]
    there: NDArray[np.bool_]
    device: torch.device

    def read(self, items: NDArray[np.int64]) -> tuple[Encoded, Tensor]:
        """Encoded items, padded, and which of them there are; the others are empty."""
        lengths = self.lengths[items]
        longest = int(lengths.max(initial=0))
        if "fragments" in self.numbers:
            longest = max(1, longest)
        places = np.arange(longest)
        mask = places < lengths[:, None]
        there = self.there[items]
        rows, shown = self._moved(np.where(mask, self.starts[items, None] + places, 0)), None
        if not mask.all():
            shown = attach_host_copy(self._moved(mask), torch.from_numpy(mask))

        def padded(name: str) -> Tensor | None:
            packed = self.numbers.get(name)
            if packed is None or not len(packed):
                return None
            found = packed.index_select(0, rows.flatten()).view(*rows.shape, -1)
            return found if shown is None else found.masked_fill_(~shown[..., None], 0)

        pooled = self.numbers.get("pooled")
        if pooled is not None:
            pooled = pooled.index_select(0, self._moved(np.where(there, self.present[items], 0)))
            if not there.all():
                pooled.masked_fill_(~self._moved(there)[:, None], 0)
        if shown is None:
            shown = torch.ones(mask.shape, dtype=torch.bool, device=self.device)
            shown = attach_host_copy(shown, torch.from_numpy(mask))
        encoded = Encoded(padded("fragments"), shown, pooled, padded("boxes"), None)
        return encoded, torch.from_numpy(there)

    def _moved(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def resident(reader: EncodedReader, device: torch.device) -> ResidentItems | None:
    """The items of a side on a GPU; None where they do not fit, or on another kind of device."""
    return copied(reader, device) if room_for(reader.size_in_bytes, device) else None


def copied(reader: EncodedReader, device: torch.device) -> ResidentItems | None:
    """The items of a side on a device; None for items with links between words."""
    if "graph" in reader.files:
        return None
    if not all(file.rows for file in reader.files.values()):
        return None
    numbers = {name: _whole(reader, name, device) for name in reader.files}
    return ResidentItems(
        numbers,
        np.maximum(reader.lengths, 0).astype(np.int64),
        reader.starts["rows"],
        reader.starts["present"],
        reader.lengths >= 0,
        device,
    )


def _whole(reader: EncodedReader, name: str, device: torch.device) -> Tensor:
    """All numbers of one kind, copied into place: parts to be joined would take the room twice."""
    file = reader.files[name]
    dtype = torch.from_numpy(np.empty(0, dtype=file.dtype)).dtype
    whole = torch.empty(file.rows, file.width, dtype=dtype, device=device)
    for first, part in zip(
        range(0, file.rows, COPY_ROWS), reader.blocks(name, COPY_ROWS), strict=True
    ):
        whole[first : first + len(part)] = torch.from_numpy(part)
    return whole


class MatrixGuide:
    """Scores that were computed when the guide was built, kept in half precision."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.file = ArrayFile(folder / MATRIX)
        expected = (manifest.data.images, manifest.data.captions)
        if self.file.shape != expected:
            raise DataError(
                f"{self.file.path}: shape {self.file.shape}, its guide says {expected}; delete "
                "and rebuild the guide"
            )

    def scores(self, image_ids: Tensor, caption_ids: Tensor, device: torch.device) -> Tensor:
        columns = caption_ids.cpu().numpy()
        found = np.empty((len(image_ids), len(columns)), dtype=np.float32)
        for row, image in enumerate(image_ids.tolist()):
            found[row] = self.file.row(image)[columns]
        return torch.from_numpy(found).to(device)


@dataclass
class StoredTeacher:
    """A teacher's matcher with everything it ever compares, on the training device if it fits."""

    matcher: Matcher
    images: EncodedReader | ResidentItems
    captions: EncodedReader | ResidentItems
    device: torch.device | None = None

    def move(self, device: torch.device) -> None:
        """Make ready for a device."""
        if device == self.device:
            return
        self.device = device
        self.matcher.to(device)
        if isinstance(self.images, EncodedReader):
            self.images = resident(self.images, device) or self.images
        if isinstance(self.captions, EncodedReader):
            self.captions = resident(self.captions, device) or self.captions

    def scores(self, image_ids: Indices, caption_ids: Indices, device: torch.device) -> Tensor:
        self.move(device)
        images, there = self.images.read(image_ids)
        captions, _ = self.captions.read(caption_ids)
        found: Tensor = self.matcher(self._compared(images), self._compared(captions))
        if bool(there.all()):
            return found.float()
        return found.float().masked_fill(~there.to(device)[:, None], torch.nan)

    def _compared(self, encoded: Encoded) -> Encoded:
        """As stored where a fused kernel compares it, else in single precision."""
        assert self.device is not None  # noqa: S101
        if isinstance(self.matcher, CrossAttentionMatcher) and self.matcher.accepts_half(
            self.device
        ):
            return encoded.to(self.device)
        return full_precision(encoded, self.device)


class EmbeddingGuide:
    """Scores of the teachers' matchers, computed when they are asked for.

    Several processes ask for the same block at the same time; each scores its share of the rows.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.teachers = [
            _stored_teacher(folder, manifest, k) for k in range(len(manifest.teachers))
        ]

    @torch.no_grad()
    def scores(self, image_ids: Tensor, caption_ids: Tensor, device: torch.device) -> Tensor:
        mine = image_ids.tensor_split(world_size())[rank()]
        if not len(mine) or not len(caption_ids):
            return gather_rows(torch.zeros(len(mine), len(caption_ids), device=device))
        images, captions = mine.cpu().numpy(), caption_ids.cpu().numpy()
        found = [teacher.scores(images, captions, device) for teacher in self.teachers]
        return gather_rows(sum(found[1:], found[0]) / len(found))


def open_guide(folder: Path, split: Split) -> MatrixGuide | EmbeddingGuide:
    """A finished guide, checked to be made of this split."""
    manifest = read_manifest(folder)
    found = difference(manifest.data, split, folder)
    if found is not None:
        raise DataError(
            f"{folder}: this guide was made of other data than the split '{split.name}': {found}. "
            "Train on the data of its teachers, or build a guide for these"
        )
    if not manifest.complete:
        raise DataError(
            f"{folder}: this guide is not finished ({manifest.share_done:.0%}); run the command "
            "that builds it again, it continues where it was"
        )
    if manifest.form == "matrix":
        return MatrixGuide(folder, manifest)
    return EmbeddingGuide(folder, manifest)


def _stored_teacher(folder: Path, manifest: Manifest, number: int) -> StoredTeacher:
    model = teacher_folder(folder, number) / MODEL
    matcher = from_pretrained(model).matcher
    check_weights(model, manifest, number)
    images, captions = (
        EncodedReader(folder / name, manifest.dtype, manifest.sides[name])
        for name in (side_name(number, "images"), side_name(number, "captions"))
    )
    return StoredTeacher(matcher.eval().requires_grad_(False), images, captions)


def check_weights(model: Path, manifest: Manifest, number: int) -> None:
    """Refuse a teacher's model whose weights are not those the guide was begun with."""
    mark = manifest.teachers[number]
    if weights_digest(model) != mark.weights_sha256:
        raise DataError(
            f"{model}: not the weights of '{mark.run}' that the guide was begun with; they were "
            "changed or trained further: build the guide anew in another folder"
        )
