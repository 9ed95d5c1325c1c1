"""What a survey has found so far, on disk: an audit that was stopped goes on from there."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from counterfoil.data.pairs import Split
from counterfoil.errors import CheckpointError, DataError
from counterfoil.files import write_atomically
from counterfoil.models.importers.pickles import read_checkpoint
from counterfoil.models.model import Model
from counterfoil.search.identity import model_digest

FORMAT = 2
"""To be raised with every change of what is kept, or of how a split is cut into blocks."""

OPERATIONS = 20_000_000
"""Pickle instructions of a file: it may list every image and caption."""

EVERY = 30.0
"""Seconds between two savings."""

SAMPLED = 16
"""Images of a split whose fragments are part of its mark."""


class Keeper:
    """One file, which counts for one ``mark`` (a model with a split) and is ignored for another."""

    def __init__(self, path: Path, mark: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.mark, self.clock = path, mark, clock
        self._last = clock()

    @classmethod
    def of(cls, path: Path, model: Model, split: Split) -> Keeper:
        return cls(path, f"{FORMAT} {model_digest(model)} {_split_mark(split)}")

    def load(self) -> dict[str, Any] | None:
        """What was kept, or None where there is nothing, or of something else, or damaged."""
        try:
            held = read_checkpoint(self.path, OPERATIONS)
        except CheckpointError:
            return None
        if not isinstance(held, dict) or held.pop("mark", None) != self.mark:
            return None
        return held

    def offer(self, state: Callable[[], dict[str, Any]], last: bool = False) -> None:
        """Save, if it is time to, or if this is the ``last`` state.

        Where that fails, as on a full disk, an audit that is not stopped loses nothing by it.
        """
        now = self.clock()
        if not last and now - self._last < EVERY:
            return
        self._last = now
        buffer = io.BytesIO()
        torch.save({"mark": self.mark, **state()}, buffer)
        with suppress(OSError):
            write_atomically(self.path, buffer.getvalue())


def _split_mark(split: Split) -> str:
    """Changes with ids, captions and their order, and with the fragments of a sample of images."""
    digest = hashlib.sha256(split.name.encode())
    for key, texts in zip(split.ids, split.captions, strict=True):
        digest.update(repr((key, list(texts))).encode())
    for image in np.linspace(0, len(split) - 1, min(SAMPLED, len(split))).astype(int).tolist():
        digest.update(_fragments(split, image))
    return digest.hexdigest()


def _fragments(split: Split, image: int) -> bytes:
    if split.fragments is None:
        return b""
    try:
        found = split.fragments.read(image)
    except DataError:
        return b"unreadable"
    boxes = b"" if found.boxes is None else found.boxes.tobytes()
    return found.features.tobytes() + boxes
