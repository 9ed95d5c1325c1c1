"""The `matrix` form of a guide: the mean scores themselves, filled a block of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from counterfoil.data.arrays import parse_header
from counterfoil.data.fragments import FragmentTable
from counterfoil.encoders import Encoded
from counterfoil.evaluation.scoring import score_all
from counterfoil.models.model import Model
from counterfoil.progress import Progress
from counterfoil.training.guide import MATRIX
from counterfoil.training.guide_encode import (
    CAPTION_BLOCK,
    IMAGE_BLOCK,
    blocks,
    caption_dtype,
    encode_image_block,
)
from counterfoil.training.guide_manifest import Manifest, side_name
from counterfoil.training.guide_store import EncodedReader, full_precision

HELD = 1 << 25
"""Scores held at once, in full precision."""


def fill_matrix(
    folder: Path,
    manifest: Manifest,
    models: Sequence[Model],
    table: FragmentTable,
    progress: Progress,
) -> None:
    """Write the mean of the models' scores of every image with every caption.

    Images are encoded a block at a time; captions were encoded before and are read back for every
    block, so that neither side is ever held whole. Rows of unreadable images are not a number.
    """
    path, captions = folder / MATRIX, manifest.data.captions
    offset = _open(path, (manifest.data.images, captions), begun=manifest.matrix_rows > 0)
    readers = [
        EncodedReader(folder / name, caption_dtype(manifest), manifest.sides[name])
        for name in (side_name(number, "captions") for number in range(len(models)))
    ]
    rows = max(1, min(IMAGE_BLOCK, HELD // max(1, captions)))
    todo = blocks(manifest.matrix_rows, manifest.data.images, rows, "scoring", progress)
    with path.open("r+b") as file:
        for images in todo:
            scores = _mean_scores(models, readers, table, images)
            file.seek(offset + images.start * captions * 2)
            file.write(scores.numpy().astype("<f2").data)
            file.flush()
            os.fsync(file.fileno())
            manifest.matrix_rows = images.stop
            manifest.save(folder)


def _open(path: Path, shape: tuple[int, int], begun: bool) -> int:
    """A `.npy` file of this shape, made anew unless it was ``begun``; where its numbers begin."""
    if not begun:
        with path.open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(file, header)
            file.truncate(file.tell() + shape[0] * shape[1] * 2)
    with path.open("rb") as file:
        return parse_header(file, str(path))[2]


@torch.inference_mode()
def _mean_scores(
    models: Sequence[Model], readers: Sequence[EncodedReader], table: FragmentTable, images: range
) -> Tensor:
    total = torch.zeros(len(images), len(readers[0]))
    for model, reader in zip(models, readers, strict=True):
        encoded, present = encode_image_block(model, table, images)
        there = torch.from_numpy(present)
        total[~there] = torch.nan
        if encoded is None:
            break
        for columns, captions in _caption_blocks(reader, model.device):
            total[there, columns] += score_all(model, encoded, captions)
    return total / len(models)


def _caption_blocks(reader: EncodedReader, device: torch.device) -> Iterator[tuple[slice, Encoded]]:
    for start in range(0, len(reader), CAPTION_BLOCK):
        stop = min(start + CAPTION_BLOCK, len(reader))
        captions, _ = reader.read(np.arange(start, stop))
        yield slice(start, stop), full_precision(captions, device)
