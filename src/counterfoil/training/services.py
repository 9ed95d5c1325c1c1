"""The objective of a run, and what it may ask of the run before the first step.

`objectives.services` describes both: `Preparation` and `Survey`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from counterfoil.core.config import RunConfig, model_folder
from counterfoil.core.distributed import gather_rows, rank, world_size
from counterfoil.core.errors import ConfigError, DataError, TrainingError
from counterfoil.core.parallel import begin_loader_worker, bounded_workers
from counterfoil.core.progress import Progress
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems, ExtraNegativeSource
from counterfoil.data.batches.sampling import BatchPlan
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import TextProcessor
from counterfoil.models.foil_generator import FoilMaker, cross_encoder_of
from counterfoil.models.model import Model
from counterfoil.models.store import first_member, from_pretrained
from counterfoil.models.warm_start import same_ids
from counterfoil.objectives import Composite, create_objective, objectives
from counterfoil.objectives.composite import PROTECT
from counterfoil.objectives.contrastive import MAX_SCALE, InfoNCE, SigLIP
from counterfoil.objectives.protection import protections
from counterfoil.objectives.services import GeneratorOptions
from counterfoil.objectives.twins import Twins, find_twins
from counterfoil.training.extra_negatives import Indices, foil_negatives, mine
from counterfoil.training.guides.guide import EmbeddingGuide, MatrixGuide, open_guide
from counterfoil.training.step import score_batch

VERBS = {"mean": "averaged", "sum": "summed"}


@dataclass(frozen=True)
class Prepared:
    """An objective that is ready for the first step, and the images it is trained on.

    ``held_out`` are images that it set aside. ``twins`` are captions of ``train`` that also belong
    to another image; they are ``protected`` if the objective never takes them as negatives.
    """

    objective: Composite
    train: Split
    held_out: Split | None
    twins: Twins | None

    @property
    def protected(self) -> Twins | None:
        return self.twins if self.objective.protects_identical else None


def prepare_objective(
    model: Model, train: Split, config: RunConfig, device: torch.device, progress: Progress
) -> Prepared:
    """Create the objective of a config, and let it prepare with the model and the training data."""
    objective = create_objective(config.objective)
    idle = objective.idle_epochs(config.train.epochs)
    if idle:
        raise ConfigError(
            f"objective: no term is active in epoch {idle[0]} (counted from 0): the ranges of "
            f"'epochs' must cover all {config.train.epochs}"
        )
    train, held_out = set_aside(train, objective.held_out, config.seed)
    prepared = Prepared(objective, train, held_out, find_twins(train, device))
    objective.prepare(TrainingRunSetup(train, model, config, device, progress, prepared.protected))
    adopt_scale(objective, config.objective, model)
    return prepared


class TrainingRunSetup:
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

    def foils(self, source: str, count: int) -> ExtraNegativeSource:
        return foil_negatives(source, count, self.train, self.progress)

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


class TrainingSurvey:
    """Every caption with its image, batch by batch, in evaluation mode and without augmentation.

    The batches are those of training: as large, and mixed anew in each epoch by the run's seed.
    """

    epoch = 0

    def __init__(
        self,
        model: Model,
        split: Split,
        config: RunConfig,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.model, self.device, self.progress = model, device, progress
        self.workers, self.chunk_size = config.data.workers, config.train.chunk_size
        self.items = CaptionItems(split, model.text, Augmentation(), config.seed)
        self.plan = BatchPlan(split, config.train.batch_size, config.seed, drop_last=False)

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        with eval_mode(self.model):
            label = "looking at the training split"
            for batch in self.progress.track(self._loader(), label, len(self.plan)):
                if not isinstance(batch, PairBatch):
                    if world_size() > 1:
                        raise TrainingError(
                            f"no usable item in the share of process {rank()}: {batch}"
                        )
                    continue
                batch = batch.to(self.device)
                members = score_batch(self.model, batch, chunk_size=self.chunk_size).members
                yield members, gather_rows(batch.image_ids), gather_rows(batch.caption_ids)

    def _shares(self) -> list[list[tuple[int, int, int]]]:
        """This process's share of each batch; all batches are about as large, none is a rest."""
        shares = []
        for batch in np.array_split(self.plan.order(self.epoch), len(self.plan)):
            share = np.array_split(batch, world_size())[rank()]
            shares.append([(self.epoch, int(caption), 0) for caption in share])
        return shares

    def _loader(self) -> DataLoader[PairBatch | tuple[str, ...]]:
        return DataLoader(
            self.items,  # type: ignore[arg-type]
            batch_sampler=self._shares(),
            num_workers=bounded_workers(self.workers, "data.workers"),
            worker_init_fn=begin_loader_worker,
            collate_fn=Collate(self.model.text.pad),
            generator=torch.Generator(),
        )


def adopt_scale(objective: Composite, stated: Mapping[str, Any], model: Model) -> None:
    """Start learned scales, and SigLIP's bias, where CLIP or SigLIP left theirs.

    Only where the configuration names no value of its own: fine-tuning at another temperature
    first undoes what pretraining learned. Other matchers than cosine have scores of another range.
    """
    found = getattr(first_member(model.image_encoder), "pretrained_scale", None)
    if found is None or model.spec.matcher["name"] != "cosine":
        return
    scale, bias = found
    for name, term in objective.each():
        given = stated.get(name)
        options: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        if not isinstance(term, (InfoNCE, SigLIP)) or term.scale.log is None:
            continue
        with torch.no_grad():
            if "temperature" not in options and "scale" not in options:
                term.scale.log.fill_(math.log(min(scale, MAX_SCALE)))
            if isinstance(term, SigLIP) and "bias" not in options and bias:
                term.bias.fill_(bias)


def objective_notes(recipe: RunConfig, config: RunConfig) -> list[str]:
    """One line for options of the recipe that are no longer set, one for another reduction.

    An objective is replaced whole, so options that the new one does not state have their defaults.
    """
    return [*_replacement_note(recipe, config), *_reduction_note(recipe, config)]


def _replacement_note(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Which terms of the recipe are gone, and which options went, also of terms that stayed."""
    before, after = _options(recipe), _options(config)
    gone = [name for name in before if name not in after and name != PROTECT]
    lost = [
        f"{name}.{key}={value}"
        for name, options in before.items()
        for key, value in options.items()
        if key not in after.get(name, {}) and not (name in after and _is_default(name, key, value))
    ]
    if not gone and not lost:
        return []
    replaced = gone or [name for name in before if name != PROTECT]
    new = ", ".join(name for name in after if name != PROTECT)
    ending = f"; no longer in force: {', '.join(lost)}" if lost else ""
    return [f"objective {new} replaces the recipe's {', '.join(replaced)}{ending}"]


def _reduction_note(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Which terms are averaged although the recipe's were summed, or the other way round."""
    before, after = set(_reductions(recipe).values()), _reductions(config)
    if len(before) != 1:  # no single scale that a new term could keep
        return []
    [wanted] = before
    changed = [name for name, reduction in after.items() if reduction != wanted]
    if not changed:
        return []
    advice = " ".join(f"objective.{name}.reduction={wanted}" for name in changed)
    if len(changed) < len(after):
        terms = ", ".join(f"{name} is {VERBS[reduction]}" for name, reduction in after.items())
        note = f"{terms} over the batch; the recipe's loss was {VERBS[wanted]}"
    else:
        note = _scale_note(recipe, config, wanted)
    return [f"{note}; to keep the recipe's scale: {advice}"]


def _scale_note(recipe: RunConfig, config: RunConfig, wanted: str) -> str:
    """By how much gradients change if every term has the other reduction."""
    averaged = wanted == "sum"
    new, old = ("averaged", "summed") if averaged else ("summed", "averaged")
    size = f"about {2 * config.train.batch_size} times as {'small' if averaged else 'large'}"
    note = f"the loss is {new} over the batch, the recipe's was {old}: gradients are {size}"
    clip = config.train.optimizer.clip
    if clip and clip == recipe.train.optimizer.clip:
        often = "hardly ever clips" if averaged else "clips nearly always"
        note += f", and train.optimizer.clip={clip:g}, set beside the recipe's loss, {often}"
    return note


def _options(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Options of each term, and of ``protect``, as configured; a bare number is the weight."""
    return {
        name: options if isinstance(options, Mapping) else _weight(options)
        for name, options in config.objective.items()
    }


def _weight(given: float | None) -> dict[str, float]:
    return {} if given is None or given == 1 else {"weight": given}


def _is_default(name: str, key: str, value: Any) -> bool:
    """Whether a term has this value of an option without stating it."""
    options = protections.options(name) if name == PROTECT else objectives.options(name)
    return bool(({"weight": 1.0, "epochs": None} | options)[key] == value)


def _reductions(config: RunConfig) -> dict[str, str]:
    """Reduction of each term that has one."""
    terms = create_objective(config.objective).each()
    return {name: str(term.reduction) for name, term in terms if hasattr(term, "reduction")}
