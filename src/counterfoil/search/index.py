"""`SearchIndex`: encoded images and captions of a model on disk, searched in both directions.

    INDEX/index.json        the manifest: settings, segments, generation (see `segments`)
    INDEX/segments/         encoded items without padding, and their descriptions
    INDEX/model/            a copy of the model
    INDEX/first/            the first-stage model, if it is another one
    INDEX/first_stage.safetensors  the fit, or the random part of fixed-dimensional encodings
    INDEX/vectors/SIDE/     the first stage, one backend for images and one for captions
    INDEX/vectors/SIDE.json the generation that the first stage is synced with

The first stage is derived from the segments after each change. If a process is killed between the
two, opening the index repairs the first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from counterfoil.core.errors import CheckpointError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import replacing
from counterfoil.core.storage.locks import locked_folder
from counterfoil.core.storage.segments import CHANGE_TASK
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.images import as_image, open_image
from counterfoil.data.pairs import Pairs, Split
from counterfoil.models import Model, from_pretrained
from counterfoil.models.store import folder_digest, model_digest
from counterfoil.search.build import Settings, create_folder
from counterfoil.search.first_stage import FirstStageOption
from counterfoil.search.items import Side
from counterfoil.search.query import Picture, Recall, Request, Results, measure_recall, search
from counterfoil.search.state import FIRST, MANIFEST, SIDES, IndexState, open_store
from counterfoil.search.update import Added, Existing, add_splits, remove_items

SHORTLIST = 200


class SearchIndex(IndexState):
    """An open index; `build` creates one, `open` opens an existing one."""

    @classmethod
    def build(
        cls,
        folder: str | Path,
        model: Model,
        pairs: Pairs | Split | Sequence[Split] | None = None,
        *,
        backend: str = "exact",
        backend_options: dict[str, Any] | None = None,
        first_stage: FirstStageOption = "auto",
        first_stage_options: dict[str, Any] | None = None,
        retriever: Model | None = None,
        fit_on: Sequence[Split] | None = None,
        dtype: str = "float16",
        shortlist_size: int = SHORTLIST,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> SearchIndex:
        """Create an index of a model with the images and captions of ``pairs``.

        A fitted first stage is fitted on these, or on ``fit_on``; ``first_stage_options`` are those
        of "fde" (see `FdeOptions`). ``dtype`` is the precision on disk: "float16", "float32",
        "int8", or "binary", which finds candidates with 1 bit per number and scores them with 8.
        ``retriever`` is a model with pooled vectors that finds the shortlist instead, for example
        for a cross-encoder.
        """
        folder, options = Path(folder), dict(backend_options or {})
        retriever = retriever.eval() if retriever is not None else None
        more = dict(first_stage_options or {})
        settings = Settings(backend, options, first_stage, dtype, shortlist_size, retriever, more)
        splits = list(fit_on) if fit_on is not None else _splits(pairs)
        advice = "wait for it, or name another folder"
        with replacing(folder, "building an index there", advice):
            there = (folder / MANIFEST).is_file()
            with locked_folder(folder, CHANGE_TASK) if there else nullcontext():
                create_folder(
                    folder, model.eval(), settings, splits, overwrite, progress or Silent()
                )
            index = cls(folder, model, options, retriever)
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
        """Open an index with its own model, or with the same model if already loaded."""
        folder = Path(folder)
        header = open_store(folder).header
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

        ``existing`` says what to do with an image whose id is in the index: "refuse" the whole
        call, "skip" it, or "update" it, which replaces the image and all its captions.
        """
        with self.locked():
            return add_splits(self, _splits(pairs), existing, progress or Silent())

    def remove(self, ids: Sequence[str]) -> int:
        """Delete images with their captions, or single captions, by id; the number deleted."""
        with self.locked():
            return remove_items(self, ids)

    def search(
        self,
        text: str | None = None,
        *,
        image: Picture | None = None,
        k: int = 10,
        target: Side | None = None,
        shortlist_size: int | None = None,
        exhaustive: bool = False,
        explain: int = 0,
    ) -> Results:
        """Images for a text, or captions for an image: a file, a picture, its pixels, or an id.

        See `counterfoil.search.query.search`.
        """
        request = Request(text, image, k, target, shortlist_size, exhaustive, explain)
        return search(self, request)

    def recall(
        self,
        queries: int = 100,
        *,
        shortlist_size: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> list[Recall]:
        """Recall of the two stages against exhaustive scoring, on sampled queries, both ways."""
        return measure_recall(self, queries, shortlist_size, seed, progress or Silent())

    def picture(self, image: str) -> Image.Image:
        """The pixels of an image by its id, read from the data set's source."""
        about = self.items["images"].about(np.array([self.key_of("images", image)]))[0]
        return open_image(as_image(about.get("pixels")))

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
        """Descriptions of damage, from the checksums of all files."""
        return [*self.store.check(), *(p for v in self.vectors.values() for p in v.check())]

    def compact(self) -> None:
        """Free the disk space of deleted items."""
        with self.locked():
            self.store.commit({side: self.items[side].rewritten(0) for side in SIDES})
            self.refresh()
            for side in SIDES:
                self.vectors[side].compact()
                self.write_generation(side)

    def __enter__(self) -> SearchIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_model(folder: Path, digest: str) -> None:
    if folder_digest(folder) != digest:
        raise CheckpointError(
            f"{folder}: not the model that this index was made with; build it again"
        )


def _splits(pairs: Pairs | Split | Sequence[Split] | None) -> list[Split]:
    if pairs is None:
        return []
    return [pairs] if isinstance(pairs, Split) else list(pairs)
