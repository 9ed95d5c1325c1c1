"""The state of an open index: its segments, items and first stage, in sync with the disk."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterfoil.core.errors import BusyError, DataError, first_problem
from counterfoil.core.storage.atomic import remove_unfinished, write_atomically
from counterfoil.core.storage.locks import locked_folder
from counterfoil.core.storage.reading import read_text
from counterfoil.core.storage.segments import CHANGE_TASK, Ids, SegmentStore
from counterfoil.models import Model
from counterfoil.search.backends import VectorIndex, backends
from counterfoil.search.fde import FixedEncoding
from counterfoil.search.first_stage import (
    FirstStage,
    FirstStageProxy,
    Fit,
    ItemEncoder,
    fragment_dim,
)
from counterfoil.search.items import BLOCK_ITEMS, Items, Side
from counterfoil.search.vectors import Vectors

KIND, MANIFEST = "search index", "index.json"
SIDES: tuple[Side, ...] = get_args(Side)
FIT, FIRST = "first_stage.safetensors", "first"

MAX_FLOATS_IN_MEMORY = 1 << 26
"""Numbers of first-stage vectors in memory while a backend is synced."""


class Header(BaseModel):
    """The settings in the manifest of an index, which may have been damaged or forged."""

    model_config = ConfigDict(strict=True)

    model: dict[str, str]
    backend: str
    backend_options: dict[str, Any]
    first_stage: FirstStage
    dtype: Literal["float16", "float32", "int8", "binary"]
    shortlist: int = Field(ge=1)
    next_key: int = Field(ge=0)
    first_model: dict[str, str] = Field(default_factory=dict)


def open_store(folder: Path) -> SegmentStore:
    """The segments of an index, with a header that is complete."""
    store = SegmentStore(folder, KIND, MANIFEST)
    path = folder / MANIFEST
    try:
        header = Header.model_validate(store.header)
    except ValidationError as error:
        raise DataError(f"{path}: damaged ({first_problem(error)}); build it again") from None
    models = [header.model, header.first_model] if "first_model" in store.header else [header.model]
    if any("sha256" not in model for model in models):
        raise DataError(f"{path}: damaged (a model without its sha256); build it again")
    if header.backend not in backends:
        known = ", ".join(backends)
        raise DataError(f"{path}: unknown search backend '{header.backend}' (known: {known})")
    if missing := set(SIDES) - set(store.tables):
        raise DataError(f"{path}: damaged (no table of {missing.pop()}); build it again")
    return store


class IndexState:
    """The shared state of all operations on an index; users open a `SearchIndex`."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        backend_options: dict[str, Any] | None = None,
        first: Model | None = None,
    ) -> None:
        self.folder, self.model = folder, model
        self.encoder = ItemEncoder(model, first)
        self.store = open_store(folder)
        header = self.store.header
        form: FirstStage = header["first_stage"]
        fit = Fit.load(folder / FIT) if form == "fitted" else None
        fde = None
        if form == "fde":
            fde = FixedEncoding.load(folder / FIT, fragment_dim(self.encoder))
        self.proxy = FirstStageProxy(model, form, fit, fde)
        self.shortlist: int = header["shortlist"]
        options = {**header["backend_options"], **(backend_options or {})}
        self.vectors: dict[Side, VectorIndex] = {
            side: backends[header["backend"]].open(vectors_folder(folder, side), options)
            for side in SIDES
        }
        self.refresh()
        self._catch_up()

    def locked(self) -> AbstractContextManager[None]:
        """Lock the index against changes by other processes, which fail instead of waiting."""
        return locked_folder(self.folder, CHANGE_TASK)

    def close(self) -> None:
        for index in self.vectors.values():
            index.close()

    def key_of(self, side: Side, name: str) -> int:
        if name not in self.items[side].names:
            raise DataError(f"{name}: no such id among the {side} of this index")
        return self.items[side].names[name]

    def sync_backend(self, side: Side, removed: Ids, added: Ids) -> None:
        """Apply a commit that was just made to the first stage of one side."""
        index = self.vectors[side]
        index.delete(removed)
        done, parts, floats = 0, [], 0
        for start in range(0, len(added), BLOCK_ITEMS):
            keys = added[start : start + BLOCK_ITEMS]
            parts.append(self.proxy.vectors(self.items[side].encoded(keys), side))
            floats += parts[-1].rows.size
            end = start + len(keys)
            if floats >= MAX_FLOATS_IN_MEMORY or end == len(added):
                index.add(added[done:end], Vectors.cat(parts))
                done, parts, floats = end, [], 0
        self.write_generation(side)

    def reload_and_merge(self) -> None:
        """Read the state after an own commit, and merge small segments."""
        self._refresh_own()
        starts = {side: self.items[side].table.find_merge_start() for side in SIDES}
        untidy = {side: start for side, start in starts.items() if start is not None}
        if untidy:
            self.store.commit(
                {side: self.items[side].rewritten(start) for side, start in untidy.items()}
            )
            self._refresh_own()

    def _refresh_own(self) -> None:
        earlier = self.items
        self.refresh()
        for side, items in self.items.items():
            items.follow(earlier[side])

    def refresh(self) -> None:
        self.items: dict[Side, Items] = {
            side: Items(self.store, side, self.model.device) for side in SIDES
        }

    def _catch_up(self) -> None:
        """Repair a first stage that misses a change because a process was killed.

        If another process holds the lock, the change is still in progress. A read-only index is
        searched as it is.
        """
        behind = [s for s in SIDES if self._read_generation(s) != self.store.manifest.generation]
        if not behind or not os.access(self.folder, os.W_OK):
            return
        with suppress(BusyError), self.locked():
            for side in behind:
                have, wanted = self.vectors[side].ids(), self.items[side].table.live_ids
                self.sync_backend(side, np.setdiff1d(have, wanted), np.setdiff1d(wanted, have))

    def write_generation(self, side: Side) -> None:
        path = vectors_folder(self.folder, side).with_suffix(".json")
        if path.parent.is_dir():
            remove_unfinished(path)
        write_atomically(path, json.dumps({"generation": self.store.manifest.generation}))

    def _read_generation(self, side: Side) -> int:
        try:
            note = json.loads(read_text(vectors_folder(self.folder, side).with_suffix(".json")))
            return int(note["generation"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1


def vectors_folder(folder: Path, side: Side) -> Path:
    return folder / "vectors" / side
