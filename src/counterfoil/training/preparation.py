"""What objectives may ask of a run before its first step (`objectives.services.Preparation`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterfoil.config import RunConfig, model_folder
from counterfoil.data.batches import Companions, PairBatch
from counterfoil.data.pairs import Split
from counterfoil.data.texts import TextProcessor
from counterfoil.errors import ConfigError, DataError
from counterfoil.models.foil_maker import FoilMaker, cross_encoder_of
from counterfoil.models.model import Model
from counterfoil.models.start import same_ids
from counterfoil.models.store import from_pretrained
from counterfoil.objectives.services import GeneratorOptions
from counterfoil.objectives.twins import Twins
from counterfoil.progress import Progress
from counterfoil.training.foils import foil_companions
from counterfoil.training.guide import EmbeddingGuide, MatrixGuide, open_guide
from counterfoil.training.mining import Indices, mine
from counterfoil.training.step import score_batch


class RunPreparation:
    """A run before it starts: its training split, its model's shape, and other runs."""

    def __init__(
        self,
        train: Split,
        model: Model,
        config: RunConfig,
        device: torch.device,
        progress: Progress,
        twins: Twins | None = None,
    ) -> None:
        self.twins = twins
        self.train, self.device, self.progress = train, device, progress
        self.seed, self.epochs = config.seed, config.train.epochs
        self.text: TextProcessor = model.text
        self.embed_size = model.spec.embed_size
        self.input_dim = model.input_dim
        self._model = model

    def teacher(self, run: str) -> RunTeacher:
        return RunTeacher(self._other(run), self.text)

    def guide(self, folder: str) -> MatrixGuide | EmbeddingGuide:
        return open_guide(Path(folder), self.train)

    def nearest(self, run: str, count: int) -> tuple[Indices, Indices]:
        """The best wrong candidates by another run; -1 where there are fewer than ``count``.

        That run reads the captions by its own vocabulary. An image that cannot be read is nobody's
        candidate, nor are its captions.
        """
        return mine(self._other(run), self.train, count, self.progress, self.twins)

    def foils(self, source: str, count: int) -> Companions:
        return foil_companions(source, count, self.train, self.progress)

    def generator(self, options: GeneratorOptions, heads: Sequence[str]) -> FoilMaker:
        cross_encoder_of(self._model, heads)
        other = self._other(options.run) if options.run else None
        if other is not None and not same_ids(other.text, self.text):
            raise ConfigError(
                f"{options.run}: the generator writes words by another vocabulary than this run; "
                "train it on the same data, or set data.vocabulary in both"
            )
        if other is not None:
            self.progress.say(
                f"{options.run}, frozen, fills the masks: this run learns no masked words from it"
            )
        return FoilMaker(self.train, self._model, options, self.seed, other)

    def _other(self, run: str) -> Model:
        """The model of another run, checked to read the same fragments."""
        model = from_pretrained(model_folder(Path(run))).to(self.device)
        made_by = self.train.fragments.made_by if self.train.fragments is not None else None
        if model.fragments_from != made_by and None not in (model.fragments_from, made_by):
            raise DataError(
                f"{run}: its model reads fragments of '{model.fragments_from}', the data of this "
                f"run has those of '{made_by}'; train both on the same features"
            )
        if model.input_dim != self.input_dim:
            raise DataError(
                f"{run}: its model reads fragments of {model.input_dim} numbers, the data of this "
                f"run has {self.input_dim}"
            )
        return model


class RunTeacher:
    """A trained model asked for the scores of a batch."""

    def __init__(self, model: Model, text: TextProcessor) -> None:
        if not same_ids(model.text, text):
            raise ConfigError(
                "the teacher reads words by another vocabulary than this run; train it on the same "
                "data, or set data.vocabulary in both"
            )
        self.model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def scores(self, batch: PairBatch) -> Tensor:
        return score_batch(self.model, batch).scores


def set_aside(split: Split, share: float, seed: int) -> tuple[Split, Split | None]:
    """A split without a share of its images, and these."""
    if not share:
        return split, None
    count = max(1, round(share * len(split)))
    if count >= len(split):
        raise ConfigError(f"{share:.0%} of {len(split)} images set aside leave none to train on")
    order = np.random.default_rng([seed, len(split)]).permutation(len(split))
    aside, rest = np.sort(order[:count]), np.sort(order[count:])
    return split.select(rest.tolist()), split.select(aside.tolist(), name="set aside")
