"""Encode all images and captions of a split, and score all pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import DataError, require_batch_size
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode, uncompiled
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.models.model import Model
from counterfoil.scoring.engine import score_matrix


@dataclass(frozen=True)
class SplitScores:
    """Scores [n_images, n_texts] of the readable images, and the image of each caption.

    ``images`` and ``texts`` are the indices into the split of the rows and columns; ``skipped``
    lists the unreadable images.
    """

    scores: Tensor
    image_of: NDArray[np.int64]
    images: list[int]
    texts: list[int]
    skipped: list[str]

    def captions(self, split: Split) -> list[str]:
        """The texts of the columns."""
        return [split.texts[text] for text in self.texts]


@torch.inference_mode()
def encode_images(
    model: Model, split: Split, batch_size: int = 256, progress: Progress | None = None
) -> tuple[Encoded, list[int], list[str]]:
    """Encoded images of a split, their indices, and a message per unreadable image."""
    progress = progress or Silent()
    table = model.fragments_of(split)
    parts: list[Encoded] = []
    readable: list[int] = []
    skipped: list[str] = []
    starts = range(0, len(split), batch_size)
    for start in progress.track(starts, f"encoding images ({split.name})", len(starts)):
        items = []
        for image in range(start, min(start + batch_size, len(split))):
            try:
                items.append(table.compact(image))
                readable.append(image)
            except DataError as error:
                skipped.append(f"image {split.ids[image]}: {error}")
        if items:
            with uncompiled(model.image_encoder):
                parts.append(model.encode_images(pad_fragments(items).to(model.device)))
    if not parts:
        raise DataError(f"split '{split.name}' has no readable image")
    return Encoded.cat(parts), readable, skipped


@torch.inference_mode()
def encode_texts(
    model: Model, texts: Sequence[str], batch_size: int = 256, progress: Progress | None = None
) -> Encoded:
    """Encoded captions in the order given; batches have captions of similar length."""
    progress = progress or Silent()
    ids = [model.text.encode(text) for text in texts]
    order = np.argsort([len(item) for item in ids], kind="stable")
    parts: list[Encoded] = []
    starts = range(0, len(ids), batch_size)
    for start in progress.track(starts, "encoding captions", len(starts)):
        batch = [ids[i] for i in order[start : start + batch_size]]
        with uncompiled(model.text_encoder):
            parts.append(model.encode_texts(pad_texts(batch, model.text.pad).to(model.device)))
    back = torch.from_numpy(np.argsort(order, kind="stable")).to(model.device)
    return Encoded.cat(parts)[back]


def score_all(
    model: Model, images: Encoded, texts: Encoded, progress: Progress | None = None
) -> Tensor:
    """Scores [n_images, n_texts] on the CPU, computed tile by tile (`engine`)."""
    return score_matrix(model.matcher, images, texts, progress)


def score_split(
    model: Model, split: Split, batch_size: int = 256, progress: Progress | None = None
) -> SplitScores:
    """Scores of every readable image of a split with every caption of these images."""
    require_batch_size(batch_size)
    with eval_mode(model):
        images, readable, skipped = encode_images(model, split, batch_size, progress)
        row_of = {image: row for row, image in enumerate(readable)}
        texts = [t for t, image in enumerate(split.image_of) if int(image) in row_of]
        if not texts:
            raise DataError(f"split '{split.name}' has no captions to evaluate on")
        encoded = encode_texts(model, [split.texts[t] for t in texts], batch_size, progress)
        scores = score_all(model, images, encoded, progress)
    image_of = np.array([row_of[int(split.image_of[t])] for t in texts], dtype=np.int64)
    return SplitScores(scores, image_of, readable, texts, skipped)
