"""`SearchIndex`: encoded images and captions of a model on disk, to be searched both ways.

    INDEX/index.json        what counts: settings, segments, generation (see `store`)
    INDEX/segments/         encoded items, packed without padding, and what they are
    INDEX/model/            the model, a copy
    INDEX/first/            the model that finds shortlists, where it is another
    INDEX/first_stage.safetensors  the fit, where the first stage is fitted
    INDEX/vectors/SIDE/     the first stage, one backend for images and one for captions
    INDEX/vectors/SIDE.json the generation that the first stage has caught up with

The segments are the truth. The first stage is made from them, after each change; where a kill came
between the two, opening the index makes up for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from PIL import Image

from counterfoil.data.images import open_image
from counterfoil.data.pairs import Pairs, Split
from counterfoil.errors import BusyError, CheckpointError, DataError
from counterfoil.files import replacing, write_atomically
from counterfoil.locks import locked_folder
from counterfoil.models import Model, from_pretrained
from counterfoil.progress import Progress, Silent
from counterfoil.reading import read_text
from counterfoil.search.backends import VectorIndex, backends
from counterfoil.search.encoding import ItemEncoder
from counterfoil.search.fit import Fit
from counterfoil.search.identity import folder_digest, model_digest
from counterfoil.search.items import Items, Side
from counterfoil.search.proxy import (
    Asked,
    FirstStage,
    FirstStageProxy,
)
from counterfoil.search.references import as_image
from counterfoil.search.store import CHANGING, SegmentStore
from counterfoil.search.table import Ids
from counterfoil.training.loop import choose_device

if TYPE_CHECKING:
    from counterfoil.search.adding import Added, Existing
    from counterfoil.search.recall import Recall
    from counterfoil.search.search import Results

KIND, MANIFEST = "search index", "index.json"
SIDES: tuple[Side, ...] = get_args(Side)
FIT, FIRST = "first_stage.safetensors", "first"
SHORTLIST = 200

FLOATS_AT_ONCE = 1 << 26
"""Numbers of first-stage vectors held at once while a backend catches up."""


class SearchIndex:
    """An index that is open; `build` makes one, `open` opens it again."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        backend_options: dict[str, Any] | None = None,
        first: Model | None = None,
    ) -> None:
        self.folder, self.model = folder, model
        self.encoder = ItemEncoder(model, first)
        self.store = SegmentStore(folder, KIND, MANIFEST)
        header = self.store.header
        form: FirstStage = header["first_stage"]
        fit = Fit.load(folder / FIT) if form == "fitted" else None
        self.proxy = FirstStageProxy(model, form, fit)
        self.shortlist: int = header["shortlist"]
        options = {**header["backend_options"], **(backend_options or {})}
        self.vectors: dict[Side, VectorIndex] = {
            side: backends[header["backend"]].open(vectors_folder(folder, side), options)
            for side in SIDES
        }
        self._refresh()
        self._catch_up()

    @classmethod
    def build(
        cls,
        folder: str | Path,
        model: Model,
        pairs: Pairs | Split | Sequence[Split] | None = None,
        *,
        backend: str = "exact",
        backend_options: dict[str, Any] | None = None,
        first_stage: Asked = "auto",
        first: Model | None = None,
        fit_on: Sequence[Split] | None = None,
        dtype: str = "float16",
        shortlist: int = SHORTLIST,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> SearchIndex:
        """A new index of a model, with the images and captions of some pairs.

        A fitted first stage is fitted on these, or on ``fit_on``. With ``first``, a model of whole
        vectors, that one finds the shortlist: for cross-encoders, which have nothing to do it with.
        """
        from counterfoil.search.building import Settings, create_folder

        folder, options = Path(folder), dict(backend_options or {})
        first = first.eval() if first is not None else None
        settings = Settings(backend, options, first_stage, dtype, shortlist, first)
        splits = list(fit_on) if fit_on is not None else _splits(pairs)
        advice = "wait for it, or name another folder"
        with replacing(folder, "building an index there", advice):
            there = (folder / MANIFEST).is_file()
            with locked_folder(folder, CHANGING) if there else nullcontext():
                create_folder(
                    folder, model.eval(), settings, splits, overwrite, progress or Silent()
                )
            index = cls(folder, model, options, first)
            if pairs is not None:
                index.add(pairs, progress=progress)
        return index

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        model: Model | None = None,
        device: str = "auto",
        backend_options: dict[str, Any] | None = None,
    ) -> SearchIndex:
        """An index on disk with the model in it, or with the same model, loaded already."""
        folder = Path(folder)
        header = SegmentStore(folder, KIND, MANIFEST).header
        wanted = header["model"]["sha256"]
        _check_model(folder / "model", wanted)
        first = None
        if "first_model" in header:
            _check_model(folder / FIRST, header["first_model"]["sha256"])
            first = from_pretrained(folder / FIRST).to(choose_device(device))
        if model is None:
            model = from_pretrained(folder / "model").to(choose_device(device))
        elif model_digest(model) != wanted:
            raise CheckpointError(
                f"{folder}: made with another model (weights, words or settings differ); "
                "use the model in the index, or build it again"
            )
        return cls(folder, model.eval(), backend_options, first)

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from changing the index; they are told, not made to wait."""
        return locked_folder(self.folder, CHANGING)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.items["images"])

    def add(
        self,
        pairs: Pairs | Split | Sequence[Split],
        *,
        existing: Existing = "refuse",
        progress: Progress | None = None,
    ) -> Added:
        """Encode and add images with their captions.

        ``existing`` says what to do with an image whose id is there already: "refuse" the whole
        call, "skip" it, or "update" it, which replaces the image and all its captions.
        """
        from counterfoil.search.adding import add_splits

        with self.locked():
            return add_splits(self, _splits(pairs), existing, progress or Silent())

    def remove(self, ids: Sequence[str]) -> int:
        """Delete images, with their captions, or single captions, by id; how many items went."""
        from counterfoil.search.adding import remove_items

        with self.locked():
            return remove_items(self, ids)

    def search(
        self,
        text: str | None = None,
        *,
        image: str | Path | Image.Image | None = None,
        k: int = 10,
        target: Side | None = None,
        shortlist: int | None = None,
        exhaustive: bool = False,
        explain: int = 0,
    ) -> Results:
        """Images for a text, or captions for an image (a file, a picture, or an id in the index).

        See `counterfoil.search.search.search`.
        """
        from counterfoil.search.search import Request, search

        request = Request(text, image, k, target, shortlist, exhaustive, explain)
        return search(self, request)

    def recall(
        self,
        queries: int = 100,
        *,
        shortlist: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> list[Recall]:
        """How much of exhaustive scoring the two stages find, both ways, on sampled queries."""
        from counterfoil.search.recall import measure_recall

        return measure_recall(self, queries, shortlist, seed, progress or Silent())

    def picture(self, image: str) -> Image.Image:
        """The pixels of an image by its id, from where the data set had them."""
        about = self.items["images"].about(np.array([self.key_of("images", image)]))[0]
        return open_image(as_image(about.get("pixels")))

    def key_of(self, side: Side, name: str) -> int:
        if name not in self.items[side].names:
            raise DataError(f"{name}: no such id among the {side} of this index")
        return self.items[side].names[name]

    def info(self) -> dict[str, Any]:
        """Plain values for a report."""
        header = {k: v for k, v in self.store.header.items() if k != "next_key"}
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return {
            "folder": str(self.folder),
            "images": len(self.items["images"]),
            "captions": len(self.items["captions"]),
            "bytes": size,
            "generation": self.store.manifest.generation,
            **header,
            "vectors": {side: index.describe() for side, index in self.vectors.items()},
        }

    def check(self) -> list[str]:
        """What is damaged, every byte compared with its checksum."""
        return [*self.store.check(), *(p for v in self.vectors.values() for p in v.check())]

    def compact(self) -> None:
        """Give the room of deleted items back."""
        with self.locked():
            self.store.commit({side: self.items[side].rewritten(0) for side in SIDES})
            self._refresh()
            for side in SIDES:
                self.vectors[side].compact()
                self._mark(side)

    def __enter__(self) -> SearchIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for index in self.vectors.values():
            index.close()

    def changed(self, side: Side, removed: Ids, added: Ids) -> None:
        """Bring the first stage of one side up with a commit that has just been made."""
        index = self.vectors[side]
        index.delete(removed)
        start, step = 0, 256
        while start < len(added):
            keys = added[start : start + step]
            vectors = self.proxy.vectors(self.items[side].encoded(keys), side)
            index.add(keys, vectors)
            start, step = start + step, max(1, FLOATS_AT_ONCE * len(keys) // vectors.rows.size)
        self._mark(side)

    def refresh_and_tidy(self) -> None:
        """Read the new state; join small segments."""
        self._refresh()
        starts = {side: self.items[side].table.untidy_from() for side in SIDES}
        untidy = {side: start for side, start in starts.items() if start is not None}
        if untidy:
            self.store.commit(
                {side: self.items[side].rewritten(start) for side, start in untidy.items()}
            )
            self._refresh()

    def _refresh(self) -> None:
        self.items: dict[Side, Items] = {
            side: Items(self.store, side, self.model.device) for side in SIDES
        }

    def _catch_up(self) -> None:
        """Make up for a change that was cut off before the first stage had it.

        While another process is at work, the change is not cut off but under way: leave it. An
        index that cannot be written is searched as it is.
        """
        behind = [s for s in SIDES if self._marked(s) != self.store.manifest.generation]
        if not behind or not os.access(self.folder, os.W_OK):
            return
        with suppress(BusyError), self.locked():
            for side in behind:
                have, wanted = self.vectors[side].ids(), self.items[side].table.live_ids
                self.changed(side, np.setdiff1d(have, wanted), np.setdiff1d(wanted, have))

    def _mark(self, side: Side) -> None:
        note = json.dumps({"generation": self.store.manifest.generation})
        write_atomically(vectors_folder(self.folder, side).with_suffix(".json"), note)

    def _marked(self, side: Side) -> int:
        try:
            note = json.loads(read_text(vectors_folder(self.folder, side).with_suffix(".json")))
            return int(note["generation"])
        except (OSError, ValueError, KeyError, TypeError):
            return -1


def _check_model(folder: Path, digest: str) -> None:
    if folder_digest(folder) != digest:
        raise CheckpointError(
            f"{folder}: not the model that this index was made with; build it again"
        )


def _splits(pairs: Pairs | Split | Sequence[Split] | None) -> list[Split]:
    if pairs is None:
        return []
    return [pairs] if isinstance(pairs, Split) else list(pairs)


def vectors_folder(folder: Path, side: Side) -> Path:
    return folder / "vectors" / side
