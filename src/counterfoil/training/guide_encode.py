"""A teacher's images and captions encoded onto disk, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.data.batches import pad_fragments
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.evaluation.scoring import encode_texts
from counterfoil.models.model import Model
from counterfoil.progress import Progress
from counterfoil.training.guide_manifest import Extent, Manifest, side_name
from counterfoil.training.guide_store import EncodedWriter

IMAGE_BLOCK, CAPTION_BLOCK = 256, 1024
"""Images and captions encoded between two entries of progress."""


def encode_images_to(
    folder: Path, manifest: Manifest, number: int, model: Model, split: Split, progress: Progress
) -> None:
    """The images of teacher ``number``; one that cannot be read leaves a gap."""
    name = side_name(number, "images")
    writer = EncodedWriter(folder / name, manifest.dtype, manifest.sides.get(name, Extent()))
    table = split.require_fragments()
    label = f"encoding images ({manifest.teachers[number].run})"
    for images in blocks(writer.done.items, len(split), IMAGE_BLOCK, label, progress):
        encoded, present = encode_image_block(model, table, images)
        manifest.sides[name] = writer.append(encoded, present)
        manifest.save(folder)


def encode_captions_to(
    folder: Path, manifest: Manifest, number: int, model: Model, split: Split, progress: Progress
) -> None:
    """The captions of teacher ``number``, as its own vocabulary reads them."""
    name = side_name(number, "captions")
    writer = EncodedWriter(
        folder / name, caption_dtype(manifest), manifest.sides.get(name, Extent())
    )
    label = f"encoding captions ({manifest.teachers[number].run})"
    total = len(split.texts)
    for captions in blocks(writer.done.items, total, CAPTION_BLOCK, label, progress):
        encoded = encode_texts(model, [split.texts[t] for t in captions])
        manifest.sides[name] = writer.append(encoded, np.ones(len(captions), dtype=np.bool_))
        manifest.save(folder)


def caption_dtype(manifest: Manifest) -> str:
    """Half precision where captions stay; a matrix has them in passing, and exactly."""
    return manifest.dtype if manifest.form == "embeddings" else "float32"


@torch.inference_mode()
def encode_image_block(
    model: Model, table: FragmentTable, images: range
) -> tuple[Encoded | None, NDArray[np.bool_]]:
    """Those of some images that can be read, encoded, and which they are."""
    items = []
    present = np.zeros(len(images), dtype=np.bool_)
    for row, image in enumerate(images):
        try:
            items.append(table.read(image))
            present[row] = True
        except DataError:
            continue
    if not items:
        return None, present
    return model.encode_images(pad_fragments(items).to(model.device)), present


def blocks(done: int, total: int, size: int, label: str, progress: Progress) -> Iterator[range]:
    """What is left of ``total`` items, ``size`` at a time, with a bar that counts what was done."""
    starts = range(done, total, size)
    before = -(-done // size)
    for start in progress.track(starts, label, before + len(starts), done=before):
        yield range(start, min(start + size, total))
