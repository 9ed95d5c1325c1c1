"""The benchmark of an audit: planted noise × models × seeds, each cell stored.

A model is given, or trained on the noisy captions themselves, which is what a data owner has. With
folds, every caption is scored by a model that was not trained on its image.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.audit.audit import audit_split
from counterfoil.audit.detection import (
    METHODS,
    detect,
    method_scores,
    standardize,
)
from counterfoil.audit.noise import NoisySplit, one_caption_each, plant
from counterfoil.audit.noise_tables import RESULTS, Cell, settings_digest
from counterfoil.audit.suspicion import Values
from counterfoil.core.config import RunConfig
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.splits import evenly_spaced
from counterfoil.models.model import Model
from counterfoil.training.run import new_model
from counterfoil.training.trainer import Trainer

FORMAT = 3
"""To increase with every change that makes stored cells incomparable: they are then refused."""

CELLS = "cells"
DEV_IMAGES = 50
"""Images that the training reports its progress on; they select nothing."""


@dataclass(frozen=True)
class Given:
    """A trained model to audit with."""

    name: str
    model: Model

    def settings(self) -> dict[str, Any]:
        from counterfoil.models.store import model_digest

        return {"model": self.name, "digest": model_digest(self.model)}


@dataclass(frozen=True)
class SelfTrained:
    """A model trained on the noisy captions themselves.

    With one fold, it is trained on all of them; with several, each fold of the images is scored by
    a model that was trained on the others. The last epoch counts: nothing clean selects one.
    """

    config: RunConfig
    folds: int = 1
    cache: Path = Path()

    @property
    def name(self) -> str:
        folds = f", {self.folds} folds" if self.folds > 1 else ""
        return f"self-trained{folds}"

    def settings(self) -> dict[str, Any]:
        config = self.config.model_dump(exclude={"seed": True})
        for key in ("source", "format", "options", "workers", "features_on_gpu"):
            config["data"].pop(key)
        config["train"].pop("device")
        return {"model": self.name, "config": config}


Source = Given | SelfTrained


@dataclass(frozen=True)
class Benchmark:
    """The cells to measure: each source with each noise, rate and seed, on one split.

    ``one_caption``: use one caption per image, as LEMoN does. ``examined``: captions whose words
    the audit examines. ``donors``: a split whose captions replace others, so that the wrong ones
    have no copy; without it they come from ``split``, as in LEMoN. Cells that ``out`` has already,
    with every method, are not measured again.
    """

    split: Split
    sources: Sequence[Source]
    noises: Sequence[str]
    rates: Sequence[float]
    seeds: Sequence[int]
    out: Path
    examined: int = 5000
    one_caption: bool = False
    donors: Split | None = None
    data: str = ""

    def run(self, progress: Progress | None = None) -> list[Cell]:
        """Measure all cells that are missing, and write the results; returns the cells named."""
        progress = progress or Silent()
        known = {settings_digest(cell.settings): cell for cell in read_cells(self.out)}
        cells = []
        for noise in self.noises:
            for rate in self.rates:
                for seed in self.seeds:
                    for source in self.sources:
                        settings = self._settings(source, noise, rate, seed)
                        cell = known.get(settings_digest(settings))
                        title = f"{source.name}, {noise} {100 * rate:g} %, seed {seed}"
                        # a cell from before a method was added is measured again
                        if cell is None or not cell.methods.keys() >= set(METHODS):
                            progress.say(f"{title} …")
                            cell = self._measure(source, noise, rate, seed, settings, progress)
                            name = f"{settings_digest(settings)}.json"
                            (self.out / CELLS).mkdir(parents=True, exist_ok=True)
                            write_atomically(self.out / CELLS / name, cell.to_json())
                        else:
                            progress.say(f"{title}: done before")
                        cells.append(cell)
        return cells

    def _settings(self, source: Source, noise: str, rate: float, seed: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "data": self.data,
            "split": self.split.name,
            "captions": _caption_digest(self.split),
            "one_caption": self.one_caption,
            "examined": self.examined,
            "noise": noise,
            "rate": rate,
            "seed": seed,
            **self._donor_settings(),
            **source.settings(),
        }

    def _donor_settings(self) -> dict[str, Any]:
        if self.donors is None:
            return {}
        return {"donors": self.donors.name, "donated": _caption_digest(self.donors)}

    def _measure(
        self,
        source: Source,
        noise: str,
        rate: float,
        seed: int,
        settings: dict[str, Any],
        progress: Progress,
    ) -> Cell:
        started = time.monotonic()
        split = one_caption_each(self.split, seed) if self.one_caption else self.split
        noisy = plant(split, noise, rate, seed, donors=self.donors)
        scores = score_methods(source, noisy, self.examined, progress)
        return Cell(
            settings=settings,
            model=source.name,
            split=split.name,
            noise=noise,
            rate=rate,
            seed=seed,
            captions=int(noisy.measured.sum()),
            wrong=int((noisy.measured & noisy.wrong).sum()),
            seconds=round(time.monotonic() - started, 1),
            methods={name: detect(values, noisy) for name, values in scores.items()},
        )


def score_methods(
    source: Source, noisy: NoisySplit, examined: int, progress: Progress
) -> dict[str, Values]:
    """The scores [captions] of all methods with a given or a newly trained model."""
    if isinstance(source, Given):
        return _scores(source.model, noisy, examined, progress)
    if source.folds == 1:
        everything = np.arange(len(noisy.split))
        return _scores(train_on(source, noisy, everything, progress), noisy, examined, progress)
    order = np.random.default_rng(noisy.seed).permutation(len(noisy.split))
    merged: dict[str, Values] = {}
    for fold in range(source.folds):
        held_out = np.sort(order[fold :: source.folds])
        rest = np.setdiff1d(order, held_out)
        model = train_on(source, noisy, rest, progress)
        part = select_images(noisy, held_out)
        captions = np.flatnonzero(np.isin(noisy.split.image_of, held_out))
        share = max(2, examined // source.folds)
        for name, values in standardize(_scores(model, part, share, progress)).items():
            merged.setdefault(name, np.full(len(noisy.wrong), np.nan))[captions] = values
    return merged


def _scores(
    model: Model, noisy: NoisySplit, examined: int, progress: Progress
) -> dict[str, Values]:
    audit = audit_split(model, noisy.split, examined=examined, details=0, progress=progress)
    return method_scores(model, noisy, audit, noisy.seed)


def select_images(noisy: NoisySplit, images: NDArray[np.int64]) -> NoisySplit:
    """A noisy split of some of the images, in their order."""
    captions = np.isin(noisy.split.image_of, images)
    return replace(
        noisy,
        split=noisy.split.select(images.tolist()),
        wrong=noisy.wrong[captions],
        clean=noisy.clean[captions],
        labeled=noisy.labeled[captions],
    )


def train_on(
    source: SelfTrained, noisy: NoisySplit, images: NDArray[np.int64], progress: Progress
) -> Model:
    """A model trained on some images with their noisy captions; the run is not kept."""
    train = noisy.split.select(images.tolist(), name="train")
    pairs = Pairs("noisy captions", {"train": train, "dev": evenly_spaced(train, DEV_IMAGES)})
    settings = source.config.train
    config = source.config.model_copy(
        update={
            "seed": noisy.seed,
            "train": settings.model_copy(update={"early_stop": 0}),
            "evaluation": source.config.evaluation.model_copy(update={"split": "dev"}),
        }
    )
    size = config.train.batch_size
    if config.train.drop_last and len(train.texts) < size:
        raise ConfigError(
            f"{len(train.texts)} captions to train on, but train.batch_size={size}; lower it, or "
            "use more images"
        )
    model = new_model(config, pairs, progress, source.cache)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, pairs, config, Path(folder), progress, cache=source.cache).run()
    return model.eval()


def read_cells(folder: Path) -> list[Cell]:
    """All cells of a folder: those of its results, and those measured since.

    Cells of another format are refused, so that no table mixes them with new ones.
    """
    cells: dict[str, Cell] = {}
    if (folder / RESULTS).is_file():
        for tree in _parse(folder / RESULTS):
            cell = Cell.from_dict(tree)
            _check_format(cell, folder / RESULTS)
            cells[settings_digest(cell.settings)] = cell
    for path in sorted((folder / CELLS).glob("*.json")):
        try:
            cell = Cell.from_json(read_text(path))
        except DataError as error:
            raise DataError(f"{path}: {error}; delete it to measure it again") from None
        _check_format(cell, path)
        cells[settings_digest(cell.settings)] = cell
    return sorted(cells.values(), key=lambda c: (c.split, c.noise, -c.rate, c.model, c.seed))


def _check_format(cell: Cell, path: Path) -> None:
    stored = cell.settings.get("format")
    if stored != FORMAT:
        raise DataError(
            f"{path}: has cells of format {stored}, expected {FORMAT}: another version measured "
            "them, whose numbers cannot be compared with those of this one; delete the file or "
            "choose another folder, and measure again"
        )


def _parse(path: Path) -> list[Any]:
    try:
        cells = json.loads(read_text(path))["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a list of stored cells ({error})") from None
    if not isinstance(cells, list):
        raise DataError(f"{path}: expected a list under 'cells', got {type(cells).__name__}")
    return cells


def _caption_digest(split: Split) -> str:
    digest = hashlib.sha256()
    for key, texts in zip(split.ids, split.captions, strict=True):
        digest.update(repr((key, list(texts))).encode())
    return digest.hexdigest()[:16]
