"""Prepares the objective of a run: teachers, guides, mining, held-out images, surveys.

`objectives.services` has the protocols. `objective_notes` describes a replaced objective.
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

from counterfoil.core import zoo
from counterfoil.core.config import RunConfig
from counterfoil.core.distributed import gather_rows, rank, world_size
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.core.parallel import begin_loader_worker, bounded_workers
from counterfoil.core.progress import Progress
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems, ExtraNegativeSource
from counterfoil.data.batches.sampling import BatchPlan
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import TextProcessor
from counterfoil.features.extractors import split_full_name
from counterfoil.models.foil_generator import FoilMaker, cross_encoder_of
from counterfoil.models.model import Model
from counterfoil.models.store import first_member
from counterfoil.models.warm_start import same_ids
from counterfoil.objectives import Composite, create_objective, objectives
from counterfoil.objectives.composite import PROTECT
from counterfoil.objectives.contrastive import MAX_SCALE, Scale, SigLIP
from counterfoil.objectives.negclip import SigLIPFoils
from counterfoil.objectives.positives import Twins, find_twins
from counterfoil.objectives.protection import protections
from counterfoil.objectives.services import GeneratorOptions, NegativeImages
from counterfoil.training.extra_negatives import (
    RULES,
    Indices,
    foil_negatives,
    foils_by_run,
    mine,
    nearest_images,
)
from counterfoil.training.guides.guide import EmbeddingGuide, MatrixGuide, load_teacher, open_guide
from counterfoil.training.negative_images import (
    RetrievedImages,
    draw_false_scenes,
    fixed_foils,
    is_drawn,
)
from counterfoil.training.step import score_batch

VERBS = {"mean": "averaged", "sum": "summed"}


@dataclass(frozen=True)
class Prepared:
    """An objective that is ready for the first step, and its training images.

    ``held_out`` are images that it holds out. ``twins`` are captions of ``train`` that also belong
    to another image; they are ``protected`` if the objective never uses them as negatives.
    """

    objective: Composite
    train: Split
    held_out: Split | None
    twins: Twins | None

    @property
    def protected(self) -> Twins | None:
        return self.twins if self.objective.protects_identical else None


def prepare_objective(
    model: Model,
    train: Split,
    config: RunConfig,
    device: torch.device,
    progress: Progress,
    cache: Path | None = None,
) -> Prepared:
    """Create the objective of a config, and prepare it with the model and the training data."""
    objective = create_objective(config.objective)
    idle = objective.idle_epochs(config.train.epochs)
    if idle:
        raise ConfigError(
            f"objective: no term is active in epoch {idle[0]} (counted from 0): the ranges of "
            f"'epochs' must cover all {config.train.epochs}"
        )
    train, held_out = set_aside(train, objective.held_out, config.seed)
    prepared = Prepared(objective, train, held_out, find_twins(train, device))
    protected = prepared.protected
    objective.prepare(TrainingRunSetup(train, model, config, device, progress, protected, cache))
    adopt_scale(objective, config.objective, model)
    return prepared


class TrainingRunSetup:
    """Access of objectives to the training split, the model's shape, and other runs."""

    def __init__(
        self,
        train: Split,
        model: Model,
        config: RunConfig,
        device: torch.device,
        progress: Progress,
        twins: Twins | None = None,
        cache: Path | None = None,
    ) -> None:
        self.twins, self.cache = twins, cache
        self._features = config.data.features
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
        """The hardest negatives by another run; -1 if there are fewer than ``count``.

        That run reads captions with its own vocabulary. Unreadable images and their captions are
        never candidates.
        """
        return mine(self._other(run), self.train, count, self.progress, self.twins)

    def foils(self, source: str, count: int) -> ExtraNegativeSource:
        if source.partition(":")[0] != RULES:
            pretrained = zoo.is_pretrained(source)
            folder = zoo.resolve(source, cache=self.cache) if pretrained else Path(source)
            if folder.is_dir():
                load, cache = self._other, self.cache
                return foils_by_run(folder, count, self.train, load, cache, self.progress)
        return foil_negatives(source, count, self.train, self.progress)

    def negative_images(self, foils: ExtraNegativeSource, images: str) -> NegativeImages:
        fixed = fixed_foils(foils, self.train, self.seed)
        if images == "drawn" or (images == "auto" and is_drawn(self.train)):
            made_by = self.train.require_fragments().made_by or self._features.extractor
            name, options = split_full_name(made_by)
            options = options or self._features.options
            return draw_false_scenes(fixed, self.train, name, options, self.cache, self.progress)
        if images in ("auto", "retrieved"):
            return RetrievedImages.of_split(fixed, self.train, None)
        if not Path(images).is_dir():
            raise ConfigError(
                f"objective.triplet-clip.images: expected auto, drawn, retrieved or the folder of "
                f"a run, got '{images}'"
            )
        other = self._other(images)
        return RetrievedImages.of_split(
            fixed,
            self.train,
            lambda texts, own: nearest_images(other, self.train, texts, own, self.progress),
        )

    def generator(self, options: GeneratorOptions, heads: Sequence[str]) -> FoilMaker:
        cross_encoder_of(self._model, heads)
        other = self._other(options.run) if options.run else None
        if other is not None and not same_ids(other.text, self.text):
            raise ConfigError(
                f"{options.run}: the generator has another vocabulary than this run; "
                "train it on the same data, or set data.vocabulary in both"
            )
        if other is not None:
            self.progress.say(
                f"{options.run} (frozen) fills the masks; this run does not learn to fill them"
            )
        judge = self._other(options.judge) if options.judge else None
        if judge is not None and not same_ids(judge.text, self.text):
            raise ConfigError(
                f"{options.judge}: the judge has another vocabulary than this run; "
                "train it on the same data, or set data.vocabulary in both"
            )
        return FoilMaker(self.train, self._model, options, self.seed, other, judge)

    def _other(self, run: str) -> Model:
        return load_teacher(Path(run), self.train).to(self.device)


class RunTeacher:
    """A trained model that scores batches."""

    def __init__(self, model: Model, text: TextProcessor) -> None:
        if not same_ids(model.text, text):
            raise ConfigError(
                "the teacher has another vocabulary than this run; train it on the same "
                "data, or set data.vocabulary in both"
            )
        self.model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def scores(self, batch: PairBatch) -> Tensor:
        return score_batch(self.model, batch).scores


def set_aside(split: Split, share: float, seed: int) -> tuple[Split, Split | None]:
    """A split without a random share of its images, and that share."""
    if not share:
        return split, None
    count = max(1, round(share * len(split)))
    if count >= len(split):
        raise ConfigError(f"holding out {share:.0%} of {len(split)} images leaves none to train on")
    order = np.random.default_rng([seed, len(split)]).permutation(len(split))
    aside, rest = np.sort(order[:count]), np.sort(order[count:])
    return split.select(rest.tolist()), split.select(aside.tolist(), name="set aside")


class TrainingSurvey:
    """Scores of all training batches in eval mode, without augmentation.

    Batches are as large as in training, and shuffled per epoch by the run's seed.
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
            label = "scoring the training split"
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

    def nearest_images(self, texts: Sequence[str], owners: Indices) -> Indices:
        return nearest_images(self.model, self.items.split, texts, owners, self.progress)

    def _shares(self) -> list[list[tuple[int, int, int]]]:
        """This process's share of each batch; all batches have about the same size."""
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
    """Initialize learned scales, and SigLIP's bias, with those of a pretrained CLIP or SigLIP.

    Only if the config sets no value: fine-tuning at another temperature would first undo
    pretraining. Matchers other than cosine have scores of another range.
    """
    pretrained_scale = getattr(first_member(model.image_encoder), "pretrained_scale", None)
    if pretrained_scale is None or model.spec.matcher["name"] != "cosine":
        return
    scale, bias = pretrained_scale
    for name, term in objective.each():
        given = stated.get(name)
        options: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        own = getattr(term, "scale", None)
        if not isinstance(own, Scale) or own.log is None:
            continue
        with torch.no_grad():
            if "temperature" not in options and "scale" not in options:
                own.log.fill_(math.log(min(scale, MAX_SCALE)))
            if isinstance(term, (SigLIP, SigLIPFoils)) and "bias" not in options and bias:
                term.bias.fill_(bias)


def objective_notes(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Notes for an objective that replaces the recipe's: options that are lost, another reduction.

    An objective is replaced as a whole, so options that the new one omits have their defaults.
    """
    return [*_replacement_note(recipe, config), *_reduction_note(recipe, config)]


def _replacement_note(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Terms and options of the recipe that are no longer set."""
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
    """Terms that are averaged although the recipe's were summed, or vice versa."""
    before, after = set(_reductions(recipe).values()), _reductions(config)
    if len(before) != 1:  # no common reduction to compare with
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
    """How much gradients change if every term has the other reduction."""
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
    """Whether a value is the default of a term's option."""
    options = protections.options(name) if name == PROTECT else objectives.options(name)
    return bool(({"weight": 1.0, "epochs": None} | options)[key] == value)


def _reductions(config: RunConfig) -> dict[str, str]:
    """Reduction of each term that has one."""
    terms = create_objective(config.objective).each()
    return {name: str(term.reduction) for name, term in terms if hasattr(term, "reduction")}
