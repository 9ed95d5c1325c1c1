"""Reads a guide: teacher scores of any image with any caption of the training data (NDGL).

NDGL's target matrix Ŝ (Eq. 3) is the mean of the teachers' scores over the whole training split.
It is never in memory: with the form `matrix` only the rows of a batch are read; with the form
`embeddings` the teachers' matchers score each batch from encodings on disk or on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.config import model_folder
from counterfoil.core.distributed import gather_rows, rank, world_size
from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.tensors.device import room_for
from counterfoil.core.tensors.host_mirror import attach_host_copy
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.encoders.stored import EncodedReader, full_precision
from counterfoil.features.extractors import same_extractor
from counterfoil.matchers import Matcher
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.models.model import Model
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


# For Flickr30K they take 6 GB per teacher in half precision. A batch is then one gather instead of
# hundreds of reads and a copy. Without room, or on a CPU, where the operating system caches files
# anyway, every batch is read from disk.
@dataclass(frozen=True)
class ResidentItems:
    """All encoded items of one side of a teacher, packed on a device; offsets are on the host."""

    numbers: dict[str, Tensor]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    pooled_rows: NDArray[np.int64]
    present: NDArray[np.bool_]
    device: torch.device

    def read(self, items: NDArray[np.int64]) -> tuple[Encoded, Tensor]:
        """Encoded items, padded, and a mask of those that exist; the others are zero."""
        lengths = self.lengths[items]
        longest = int(lengths.max(initial=0))
        if "fragments" in self.numbers:
            longest = max(1, longest)
        columns = np.arange(longest)
        mask = columns < lengths[:, None]
        present = self.present[items]
        rows, device_mask = self._moved(np.where(mask, self.starts[items, None] + columns, 0)), None
        if not mask.all():
            device_mask = attach_host_copy(self._moved(mask), torch.from_numpy(mask))

        def padded(name: str) -> Tensor | None:
            packed = self.numbers.get(name)
            if packed is None or not len(packed):
                return None
            values = packed.index_select(0, rows.flatten()).view(*rows.shape, -1)
            return (
                values if device_mask is None else values.masked_fill_(~device_mask[..., None], 0)
            )

        pooled = self.numbers.get("pooled")
        if pooled is not None:
            pooled = pooled.index_select(
                0, self._moved(np.where(present, self.pooled_rows[items], 0))
            )
            if not present.all():
                pooled.masked_fill_(~self._moved(present)[:, None], 0)
        if device_mask is None:
            device_mask = torch.ones(mask.shape, dtype=torch.bool, device=self.device)
            device_mask = attach_host_copy(device_mask, torch.from_numpy(mask))
        encoded = Encoded(padded("fragments"), device_mask, pooled, padded("boxes"), None)
        return encoded, torch.from_numpy(present)

    def _moved(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def resident(reader: EncodedReader, device: torch.device) -> ResidentItems | None:
    """The items of a side on a GPU; None if they do not fit, or on other devices."""
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
    """One array on the device, filled in blocks: concatenation would take twice the memory."""
    file = reader.files[name]
    dtype = torch.from_numpy(np.empty(0, dtype=file.dtype)).dtype
    whole = torch.empty(file.rows, file.width, dtype=dtype, device=device)
    for first, part in zip(
        range(0, file.rows, COPY_ROWS), reader.blocks(name, COPY_ROWS), strict=True
    ):
        whole[first : first + len(part)] = torch.from_numpy(part)
    return whole


class MatrixGuide:
    """Scores that were computed when the guide was built, in half precision."""

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
        scores = np.empty((len(image_ids), len(columns)), dtype=np.float32)
        for row, image in enumerate(image_ids.tolist()):
            scores[row] = self.file.row(image)[columns]
        return torch.from_numpy(scores).to(device)


@dataclass
class StoredTeacher:
    """A teacher's matcher and encoded items, on the training device if they fit."""

    matcher: Matcher
    images: EncodedReader | ResidentItems
    captions: EncodedReader | ResidentItems
    device: torch.device | None = None

    def move(self, device: torch.device) -> None:
        """Move the matcher, and the items if they fit, to a device."""
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
        images, present = self.images.read(image_ids)
        captions, _ = self.captions.read(caption_ids)
        scores: Tensor = self.matcher(self._compared(images), self._compared(captions))
        if bool(present.all()):
            return scores.float()
        return scores.float().masked_fill(~present.to(device)[:, None], torch.nan)

    def _compared(self, encoded: Encoded) -> Encoded:
        """In half precision if a fused kernel accepts it, otherwise in single precision."""
        assert self.device is not None  # noqa: S101
        if isinstance(self.matcher, CrossAttentionMatcher) and self.matcher.accepts_half(
            self.device
        ):
            return encoded.to(self.device)
        return full_precision(encoded, self.device)


class EmbeddingGuide:
    """Scores of the teachers' matchers, computed on demand.

    With several processes, all request the same block and each scores its share of the rows.
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
        scores = [teacher.scores(images, captions, device) for teacher in self.teachers]
        return gather_rows(sum(scores[1:], scores[0]) / len(scores))


def open_guide(folder: Path, split: Split) -> MatrixGuide | EmbeddingGuide:
    """A finished guide, checked to be built from this split."""
    manifest = read_manifest(folder)
    reason = difference(manifest.data, split, folder)
    if reason is not None:
        raise DataError(
            f"{folder}: this guide was made of other data than the split '{split.name}': {reason}. "
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


def load_teacher(run: Path, split: Split) -> Model:
    """The best model of a run, checked to read the fragments of a split."""
    model, table = from_pretrained(model_folder(run)), split.require_fragments()
    wanted, given = model.fragments_name, table.made_by
    if wanted is not None and given is not None and not same_extractor(wanted, given):
        raise DataError(
            f"{run}: its model reads fragments of '{wanted}', the data have those of '{given}'; "
            "train both on the same features"
        )
    if model.input_dim != table.dim:
        raise DataError(
            f"{run}: its model reads fragments of {model.input_dim} numbers, the data have "
            f"{table.dim}; train both on the same features"
        )
    return model


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
    """Refuse a teacher's model with other weights than the guide was started with."""
    mark = manifest.teachers[number]
    if weights_digest(model) != mark.weights_sha256:
        raise DataError(
            f"{model}: not the weights of '{mark.run}' that the guide was begun with; they were "
            "changed or trained further: build the guide anew in another folder"
        )
