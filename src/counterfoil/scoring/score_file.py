"""A score matrix on disk, filled tile by tile, that a kill at any moment does not spoil.

The scores stand in ``NAME.npy.partial`` until all are there. Beside it ``NAME.npy.journal`` says
what is scored, by which plan, and which tiles are on the disk; a later call with the same inputs
goes on from there, with the same tiles and so to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor, nn

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import put_in_place, sync_file, write_atomically
from counterfoil.core.storage.locks import locked_target
from counterfoil.core.storage.reading import read_text
from counterfoil.encoders import Encoded
from counterfoil.matchers import Matcher
from counterfoil.scoring.engine import LABEL, fill, on_host, scored_tiles
from counterfoil.scoring.plan import ScorePlan, plan_scores


@torch.inference_mode()
def score_to_file(
    path: Path,
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    progress: Progress | None = None,
    cells: int | None = None,
) -> NDArray[np.float32]:
    """Scores [n_images, n_texts] as a memory-mapped ``.npy``; what was begun before is finished."""
    mark = fingerprint(matcher, images, texts)
    if path.exists():
        _Journal.of(path, mark)  # finished scores of something else are refused
    else:
        with locked_target(path, "writing scores to it"):
            _fill(_Journal.of(path, mark), matcher, images, texts, progress or Silent(), cells)
    scores: NDArray[np.float32] = np.load(path, mmap_mode="r")
    return scores


def _fill(
    journal: _Journal,
    matcher: Matcher,
    images: Encoded,
    texts: Encoded,
    progress: Progress,
    cells: int | None,
) -> None:
    if journal.scores.exists():  # another process has finished them meanwhile
        return
    plan = journal.begin(plan_scores(images, texts, cells))
    matrix = _partial(journal.partial, (len(images), len(texts)))
    scores, before = torch.from_numpy(matrix), len(journal.done)
    tiles = on_host(scored_tiles(matcher, images, texts, plan, set(journal.done)))
    for tile, block in progress.track(tiles, LABEL, len(plan.tiles), done=before):
        fill(scores, plan, tile, block)
        matrix.flush()
        journal.add(tile.number)
    matrix.flush()
    put_in_place(journal.partial, journal.scores)


def _partial(path: Path, shape: tuple[int, int]) -> np.memmap[Any, np.dtype[np.float32]]:
    """The matrix that is being filled; a new one takes its name when it has its full size."""
    if not path.exists():
        new = path.with_name(f".{path.name}.new")
        open_memmap(new, "w+", np.float32, shape).flush()
        sync_file(new)
        put_in_place(new, path)
    matrix: np.memmap[Any, np.dtype[np.float32]] = open_memmap(path, "r+")
    return matrix


def fingerprint(matcher: Matcher, images: Encoded, texts: Encoded) -> str:
    """A digest of all that scores depend on."""
    parts = [(type(part).__qualname__, _settings(part)) for part in matcher.modules()]
    digest = hashlib.sha256(repr(parts).encode())
    for name, value in matcher.state_dict().items():
        _digest(digest, name, value)
    for side in (images, texts):
        for field in fields(side):
            _digest(digest, field.name, getattr(side, field.name))
    return digest.hexdigest()


def _settings(part: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple)
    return {k: v for k, v in sorted(vars(part).items()) if isinstance(v, plain)}


def _digest(digest: Any, name: str, value: Tensor | None) -> None:
    if value is None:
        return
    digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    for part in value.reshape(-1).split(1 << 24):
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)


@dataclass
class _Journal:
    """What scores are being written, and which tiles of which plan are on the disk."""

    scores: Path
    mark: str
    head: dict[str, Any]
    done: list[int]

    @property
    def path(self) -> Path:
        return self.scores.with_name(f"{self.scores.name}.journal")

    @property
    def partial(self) -> Path:
        return self.scores.with_name(f"{self.scores.name}.partial")

    @classmethod
    def of(cls, scores: Path, mark: str) -> _Journal:
        """The journal of some scores, as it was left; empty where there is none."""
        journal = cls(scores, mark, {}, [])
        if not journal.path.exists():
            if scores.exists():
                raise DataError(f"{scores}: exists and was not written here; choose another file")
            return journal
        head, *lines = read_text(journal.path).split("\n")
        # the last line was cut off, or is empty
        try:
            journal.head = json.loads(head)
            begun, journal.done = journal.head["fingerprint"], [int(line) for line in lines[:-1]]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{journal.path}: damaged, not what was written here; delete it, and what else is "
                f"named after {scores.name}, to score anew"
            ) from None
        if begun != mark:
            raise DataError(
                f"{scores}: begun with another model or other data; choose another file, or "
                f"delete {scores.name} and what is named after it"
            )
        return journal

    def begin(self, plan: ScorePlan) -> ScorePlan:
        """The plan to go on with: the one begun by, else ``plan``."""
        if self.head and self.partial.exists():
            plan = replace(plan, rows=self.head["rows"], cells=self.head["cells"])
        else:
            self.partial.unlink(missing_ok=True)
            self.head = {"fingerprint": self.mark, "rows": plan.rows, "cells": plan.cells}
            self.done = []
        lines = [json.dumps(self.head), *map(str, self.done)]
        write_atomically(self.path, "\n".join(lines) + "\n")
        return plan

    def add(self, number: int) -> None:
        self.done.append(number)
        with self.path.open("a", encoding="ascii") as file:
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
