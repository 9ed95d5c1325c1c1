"""Encoded images or captions on disk, packed without padding, appended block by block.

Each kind of vector is one file of plain numbers: ``fragments.bin`` [rows, width], ``pooled.bin``
[present, width], ``boxes.bin`` [rows, 4], ``graph.bin`` [cells]. ``lengths.bin`` has the number of
fragments of every item, -1 for an unreadable one. Bytes beyond the `Extent` in the manifest are
from an interrupted build and are truncated. With the dtype ``int8``, vectors are codes, and the
scale of each is in ``fragments_scale.bin`` [rows, 1] or ``pooled_scale.bin`` [present, 1].

Items are read by offset. A memory map would be as fast, but its pages count as resident memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import Descriptor, read_into
from counterfoil.encoders import Encoded

LENGTHS, UNREADABLE = "lengths", -1
SCALE = "_scale"
CODE_MAX = 127


def quantize(rows: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes [R, D] of -127 to 127 and scales [R] of vectors [R, D].

    A code times its scale is within half a scale of the number, so the inner product with a vector
    q is within ‖q‖₁ / 2 scales of the exact one.
    """
    rows = np.asarray(rows, dtype=np.float32)
    scales = (np.abs(rows).max(axis=1, initial=0.0) / CODE_MAX).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 0  # too small to divide by
    codes = np.rint(rows / np.where(scales > 0, scales, np.inf)[:, None])
    return codes.clip(-CODE_MAX, CODE_MAX).astype(np.int8), scales


def dequantize(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The numbers that codes [..., D] with scales [...] stand for."""
    return np.multiply(codes, scales[..., None], dtype=np.float32)


class Extent(BaseModel):
    """How much of an encoded side is complete on disk.

    ``rows`` counts fragments, ``cells`` entries of word graphs, ``present`` readable items;
    ``widths`` has the width of each kind of vector.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    items: int = Field(0, ge=0)
    present: int = Field(0, ge=0)
    rows: int = Field(0, ge=0)
    cells: int = Field(0, ge=0)
    widths: dict[str, PositiveInt] = Field(default_factory=dict)


class EncodedWriter:
    """Appends blocks of encoded items.

    `append` returns once a block is on disk, unless the caller will ``sync`` the files itself.
    """

    def __init__(self, folder: Path, dtype: str, done: Extent, sync: bool = True) -> None:
        self.folder, self.dtype, self.done, self.sync = folder, np.dtype(dtype), done, sync
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.bin"):
            if path.stem not in (LENGTHS, *done.widths):
                path.unlink()
        for name in (LENGTHS, *done.widths):
            path = folder / f"{name}.bin"
            path.touch()
            size = _size(name, done, self.dtype)
            if path.stat().st_size < size:
                raise DataError(
                    f"{path}: {path.stat().st_size} bytes, expected at least {size}; delete "
                    f"{folder.parent} and rebuild"
                )
            os.truncate(path, size)

    def append(self, encoded: Encoded | None, present: NDArray[np.bool_]) -> Extent:
        """Write a block of ``len(present)`` items; ``encoded`` has the present ones."""
        lengths = np.full(len(present), UNREADABLE, dtype="<i4")
        arrays: dict[str, NDArray[Any]] = {}
        if encoded is not None:
            encoded = encoded.to("cpu")
            lengths[present] = encoded.mask.sum(1).numpy()
            arrays = self._pack(encoded)
        for name, array in {LENGTHS: lengths, **arrays}.items():
            with (self.folder / f"{name}.bin").open("ab") as file:
                file.write(np.ascontiguousarray(array).data)
                if self.sync:
                    file.flush()
                    os.fsync(file.fileno())
        real = lengths[lengths > 0].astype(np.int64)
        widths = {name: int(array.shape[-1]) for name, array in arrays.items()}
        self.done = Extent(
            items=self.done.items + len(present),
            present=self.done.present + int(present.sum()),
            rows=self.done.rows + int(real.sum()),
            cells=self.done.cells + int((real**2).sum()),
            widths=self.done.widths | widths,
        )
        return self.done

    def _pack(self, encoded: Encoded) -> dict[str, NDArray[Any]]:
        mask = encoded.mask
        arrays: dict[str, NDArray[Any]] = {}
        if encoded.fragments is not None:
            arrays |= self._cast("fragments", encoded.fragments[mask])
        if encoded.boxes is not None:
            arrays["boxes"] = encoded.boxes[mask].numpy().astype("<f4")
        if encoded.pooled is not None:
            arrays |= self._cast("pooled", encoded.pooled)
        if encoded.graph is not None:
            cells = encoded.graph[mask[:, :, None] & mask[:, None, :]]
            arrays["graph"] = cells.numpy().astype(np.uint8)[:, None]
        return arrays

    def _cast(self, name: str, tensor: Tensor) -> dict[str, NDArray[Any]]:
        array = tensor.float().numpy()
        if self.dtype != np.int8:
            with np.errstate(over="ignore"):
                array = array.astype(self.dtype)
        if not np.isfinite(array).all():
            raise DataError(
                f"{self.folder}: an encoding of the teacher is not finite in {self.dtype}; "
                "build the guide with --form matrix, which stores scores only"
            )
        if self.dtype != np.int8:
            return {name: array}
        codes, scales = quantize(array)
        return {name: codes, name + SCALE: scales[:, None]}


class EncodedReader:
    """Items of a finished side, by their indices."""

    def __init__(self, folder: Path, dtype: str, extent: Extent) -> None:
        self.extent = extent
        self.files = {
            name: _Numbers(folder / f"{name}.bin", name, extent, np.dtype(dtype))
            for name in (LENGTHS, *extent.widths)
        }
        self.lengths = np.empty(extent.items, dtype="<i4")
        self.files.pop(LENGTHS).read(0, self.lengths)
        present = self.lengths != UNREADABLE
        real = np.maximum(self.lengths, 0).astype(np.int64)
        totals = int(present.sum()), int(real.sum()), int((real**2).sum())
        if totals != (extent.present, extent.rows, extent.cells):
            raise DataError(
                f"{folder}: damaged (its lengths and its manifest disagree); rebuild it"
            )
        self.starts = {
            "rows": _starts(real),
            "cells": _starts(real**2),
            "present": _starts(present.astype(np.int64)),
        }

    def __len__(self) -> int:
        return self.extent.items

    @property
    def size_in_bytes(self) -> int:
        return sum(file.rows * file.width * file.dtype.itemsize for file in self.files.values())

    def blocks(self, name: str, rows: int) -> Iterator[NDArray[Any]]:
        """All vectors of one kind, ``rows`` at a time."""
        file = self.files[name]
        for first in range(0, file.rows, rows):
            block = np.empty((min(rows, file.rows - first), file.width), dtype=file.dtype)
            file.read(first, block)
            yield block

    def read(self, items: Sequence[int] | NDArray[np.int64]) -> tuple[Encoded, Tensor]:
        """Items as stored, padded, and which are present [B]; the others are empty."""
        chosen = np.asarray(items, dtype=np.int64)
        lengths = np.maximum(self.lengths[chosen], 0)
        present = self.lengths[chosen] != UNREADABLE
        longest = int(lengths.max(initial=0))
        if "fragments" in self.files:
            longest = max(1, longest)
        mask = np.arange(longest)[None, :] < lengths[:, None]
        tensors: dict[str, Tensor] = {}
        for name, file in self.files.items():
            if name.removesuffix(SCALE) == "pooled":
                tensors[name] = self._read(file, "present", chosen, present, present)
            elif name == "graph":
                cells = mask[:, :, None] & mask[:, None, :]
                links = self._read(file, "cells", chosen, lengths**2, cells)
                tensors[name] = links[..., 0].bool()
            else:
                tensors[name] = self._read(file, "rows", chosen, lengths, mask)
        for name in [name for name in tensors if name.endswith(SCALE)]:
            tensors[name.removesuffix(SCALE)] = (
                tensors.pop(name) * tensors[name.removesuffix(SCALE)]
            )
        fragments = tensors.pop("fragments", None)
        encoded = Encoded(fragments, torch.from_numpy(mask), **tensors)
        return encoded, torch.from_numpy(present)

    def _read(
        self,
        file: _Numbers,
        unit: str,
        chosen: NDArray[np.int64],
        counts: NDArray[Any],
        where: NDArray[np.bool_],
    ) -> Tensor:
        """Numbers [*where, width] of items that have ``counts`` rows each, zero elsewhere."""
        ends = np.cumsum(counts, dtype=np.int64)
        rows = np.empty((int(counts.sum()), file.width), dtype=file.dtype)
        # items that follow each other are read at once
        breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
        for first, end in pairwise([0, *breaks.tolist(), len(chosen)]):
            part = rows[ends[first] - counts[first] : ends[end - 1]] if end > first else rows[:0]
            if len(part):
                file.read(int(self.starts[unit][chosen[first]]), part)
        out = np.zeros((*where.shape, file.width), dtype=file.dtype)
        out[where] = rows
        return torch.from_numpy(out)


class _Numbers:
    """One file of a store, read from any row."""

    def __init__(self, path: Path, name: str, extent: Extent, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, _dtype(name, dtype)
        self.width = extent.widths.get(name, 1)
        self.rows = _rows(name, extent)
        expected = _size(name, extent, dtype)
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); rebuild the guide"
            ) from None
        if actual < expected:
            raise DataError(
                f"{path}: cut short ({actual} bytes of {expected}); delete and rebuild the guide"
            )
        self.file = Descriptor(path)

    def read(self, row: int, out: NDArray[Any]) -> None:
        if not read_into(out, self.file.fd, row * self.width * self.dtype.itemsize):
            raise DataError(f"{self.path}: ends inside row {row}; was it changed meanwhile?")


def full_precision(encoded: Encoded, device: torch.device) -> Encoded:
    """Stored items on a device, in float32, as matchers expect them."""
    moved = encoded.to(device)
    return moved.map(lambda x: x.float() if x.is_floating_point() else x)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offset of each item, from the sizes of all."""
    starts: NDArray[np.int64] = np.cumsum(counts) - counts
    return starts


def _dtype(name: str, numbers: np.dtype[Any]) -> np.dtype[Any]:
    fixed = {LENGTHS: "<i4", "boxes": "<f4", "graph": "u1"}
    if name.endswith(SCALE):
        return np.dtype("<f4")
    return np.dtype(fixed[name]) if name in fixed else numbers


def _rows(name: str, extent: Extent) -> int:
    counts = {LENGTHS: extent.items, "graph": extent.cells, "pooled": extent.present}
    return counts.get(name.removesuffix(SCALE), extent.rows)


def _size(name: str, extent: Extent, numbers: np.dtype[Any]) -> int:
    """Bytes of a file of a store."""
    return _rows(name, extent) * extent.widths.get(name, 1) * _dtype(name, numbers).itemsize
