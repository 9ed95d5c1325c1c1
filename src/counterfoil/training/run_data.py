"""The data of a run: pairs and features of its config, its batches, data of finished runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from counterfoil.core.config import EvaluationConfig, FeaturesConfig, RunConfig, model_folder
from counterfoil.core.distributed import rank, world_size
from counterfoil.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LostLoaderError,
    TrainingError,
)
from counterfoil.core.parallel import begin_loader_worker, bounded_workers
from counterfoil.core.progress import Progress
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.device_features import features_on_device
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.batches.streaming import StreamLoader, StreamPlan, find_layout
from counterfoil.data.formats.table import UNRELATED, UNUSED
from counterfoil.data.fragments import PixelAugmentation
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import DEV_NAMES, Pairs, Problem, Severity, Split, count_kinds
from counterfoil.data.photos import has_only_photos, read_photos
from counterfoil.data.splits import (
    lacks_dev,
    read_dev_split,
    shuffled_captions,
    undivided,
    with_dev_split,
    with_noise_index,
)
from counterfoil.features import extractors, with_fragments
from counterfoil.models import Model, resolve
from counterfoil.models.catalogue import pixel_options, reads_pixels
from counterfoil.objectives import Composite
from counterfoil.training.run_folder import load_model, run_config

DATA_IDENTITY_KEYS = (
    "source",
    "format",
    "options",
    "features",
    "noise",
    "noise_index",
    "dev_share",
)
"""Config keys that determine images, captions, features and their order."""

DEFAULT_EXTRACTOR = "segments"


def read_data(
    config: RunConfig,
    cache: Path,
    progress: Progress,
    features: FeaturesConfig | None = None,
    aside: Collection[str] | None = None,
) -> Pairs:
    """The pairs of a config, with fragments by its own features or by ``features``.

    Data without a dev split get one from their training images: ``aside``, if a run saved it.
    """
    pairs = load_pairs(
        config.data.source,
        config.data.format,
        options=config.data.options,
        cache_dir=cache,
        progress=progress,
    )
    check_splits(config, pairs)
    features = features or wanted_features(config)
    pairs = with_fragments(pairs, cache, features.extractor, features.options, progress)
    if config.evaluation.split in DEV_NAMES:
        pairs = with_dev_split(pairs, config.data.dev_share, aside)
    pairs = with_noise(config, pairs)  # after the dev split, which stays clean
    widths = {split.name: split.fragments.dim for split in pairs if split.fragments is not None}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise DataError(f"data set '{pairs.name}': features of different widths ({listed})")
    return pairs


def wanted_features(config: RunConfig) -> FeaturesConfig:
    """The features of a config; a model that reads pixels has its own."""
    stated, own = config.data.features, pixel_options(resolve(config.model))
    if own is None:
        return stated
    if stated != FeaturesConfig() and not stated.extractor.startswith("pixels"):
        raise ConfigError(
            f"data.features: the model '{config.model.name}' reads pixels, not features of "
            f"'{stated.extractor}'; leave data.features out"
        )
    return FeaturesConfig(extractor="pixels", options={**own, **stated.options})


def with_noise(config: RunConfig, pairs: Pairs) -> Pairs:
    """The pairs with training captions shuffled according to the config."""
    data = config.data
    if data.noise_index:
        if data.noise:
            raise ConfigError("data.noise and data.noise_index are both set: set only one of them")
        try:
            index = ArrayFile(data.noise_index).whole()
        except DataError as error:
            raise DataError(f"data.noise_index: {error}") from None
        train = with_noise_index(pairs.train, index)
    elif data.noise:
        train, _ = shuffled_captions(pairs.train, data.noise, config.seed)
    else:
        return pairs
    return replace(pairs, splits={**pairs.splits, "train": train})


def check_splits(config: RunConfig, pairs: Pairs) -> None:
    """Refuse data without the splits that a run needs, before features are extracted."""
    settings = config.evaluation
    needed = {"train": "train", settings.split: "evaluation.split"}
    if settings.test_split != EvaluationConfig().test_split:
        needed[settings.test_split] = "evaluation.test_split"
    for name, key in needed.items():
        if name in pairs or (name in DEV_NAMES and lacks_dev(pairs) and config.data.dev_share):
            continue
        advice = (
            "; data.dev_share=0.05 sets a part of 'train' aside for it"
            if name in DEV_NAMES and lacks_dev(pairs)
            else f"; name another one with {key}"
            if key != name
            else "; call the split to train on 'train'"
        )
        raise DataError(
            f"data set '{pairs.name}' has no split '{name}', which "
            f"{'training needs' if key == 'train' else f'{key} names'} "
            f"(it has: {', '.join(pairs.splits) or 'none'}){advice}"
        )


def skipped_kinds(pairs: Pairs) -> dict[str, int]:
    """Numbers of skipped items per kind of problem."""
    return count_kinds(skipped_items(pairs))


def skipped_items(pairs: Pairs) -> list[Problem]:
    """The problems for which items were left out of the data."""
    return [problem for problem in pairs.problems if problem.severity is Severity.SKIP]


def skipped_notice(pairs: Pairs) -> str:
    """A warning that counts the items left out of the data; empty if there are none."""
    counts = ", ".join(f"{number} × {kind}" for kind, number in skipped_kinds(pairs).items())
    if not counts:
        return ""
    return f"warning: left out of the data: {counts} (see: counterfoil data inspect)"


LOST_WORKER = ("killed by signal", "exited unexpectedly", "unable to resize file", "shared memory")
"""Words of PyTorch's errors if a loader process was killed, or had no shared memory for a batch."""


RESUME_ADVICE = "the last checkpoint is intact: continue with: counterfoil train --resume RUN"


def _last_line(error: Exception) -> str:
    """The reason; the error of a loader process has its traceback before it."""
    return str(error).strip().rpartition("\n")[2]


@contextmanager
def lost_workers() -> Iterator[None]:
    """Explain the loss of a loader process, which PyTorch raises at any moment, from a signal."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST_WORKER):
            raise
        raise LostLoaderError(
            f"a loader process was lost ({_last_line(error)}); {RESUME_ADVICE}, with fewer "
            "data.workers or, if there is little, more shared memory (/dev/shm)"
        ) from error


def _plan(train: Split, config: RunConfig) -> BatchPlan:
    """The plan of the batches; a stream's if the config says so, or if the shards are remote."""
    data, settings = config.data, config.train
    how: dict[str, Any] = {
        "seed": config.seed,
        "captions": data.captions,
        "drop_last": settings.drop_last,
        "views": data.views,
    }
    layout = find_layout(train) if data.stream is not False else None
    if layout is None and data.stream:
        raise ConfigError(
            "data.stream: the training images and features are not in shards (.tar), which a "
            "stream reads in order; convert them (counterfoil data convert --to shards), or leave "
            "data.stream out"
        )
    if layout is None or not (data.stream or layout.is_remote):
        return BatchPlan(train, settings.batch_size, **how)
    if data.features_on_gpu:
        raise ConfigError("data.features_on_gpu: a stream does not hold all features; leave it out")
    return StreamPlan(
        train,
        settings.batch_size,
        **how,
        layout=layout,
        buffer=data.shuffle_buffer,
        world=world_size(),
    )


class TrainingBatches:
    """The training batches of a run: their plan, items and data loader."""

    def __init__(
        self,
        train: Split,
        model: Model,
        objective: Composite,
        config: RunConfig,
        device: torch.device,
        progress: Progress,
    ) -> None:
        data, seed = config.data, config.seed
        self.device, self.progress = device, progress
        self.workers, self.collate = data.workers, Collate(model.text.pad)
        self.plan = _plan(train, config)
        self.shares = RankBatches(self.plan, 0, 0, rank(), world_size())
        resident = False if self.is_stream else data.features_on_gpu
        self.device_features = features_on_device(train.fragments, resident, device, progress)
        self.items = CaptionItems(
            train,
            model.text,
            Augmentation(
                data.drop_regions,
                data.word_noise,
                data.drop_regions_varying,
                PixelAugmentation(data.random_crop, data.flip),
            ),
            seed,
            objective.extra_sources_by_term(),
            resident=self.device_features.usable if self.device_features else None,
        )
        self._loader: DataLoader[Any] | None = None
        self.saved_processes = world_size()

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.plan)

    @property
    def is_stream(self) -> bool:
        """Whether batches are read from shards in order."""
        return isinstance(self.plan, StreamPlan)

    def state_dict(self) -> dict[str, Any]:
        """What a stream must have in common with the run that it continues."""
        shards = self.plan.layout.digest() if isinstance(self.plan, StreamPlan) else ""
        return {"processes": world_size(), "shards": shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()
        if state["shards"] != own["shards"]:
            raise CheckpointError(
                "the shards are not those that this run was started with (others, or changed "
                "since then); start a new run"
            )
        self.saved_processes = int(state["processes"])

    def check_resumed(self, batch: int) -> None:
        """Refuse to continue an epoch with other pieces of the shards than it began with."""
        if self.is_stream and batch and self.saved_processes != world_size():
            raise CheckpointError(
                f"the epoch began with {self.saved_processes} processes, and each of them reads "
                f"its own shards: continue with {self.saved_processes}, not {world_size()}"
            )

    def loader(self, epoch: int, start: int) -> DataLoader[Any] | StreamLoader:
        """This process's share of the batches of an epoch, from batch ``start`` on."""
        self.shares.epoch, self.shares.start = epoch, start
        if self.is_stream:
            threads = bounded_workers(self.workers, "data.workers", self.progress)
            return StreamLoader(self.items, self.shares, self.collate, threads)
        if self._loader is None:
            workers = bounded_workers(self.workers, "data.workers", self.progress)
            self._loader = DataLoader(
                self.items,
                batch_sampler=self.shares,
                num_workers=workers,
                worker_init_fn=begin_loader_worker,
                collate_fn=self.collate,
                # pinning needs a thread, which only pays off for fragments
                pin_memory=self.device.type == "cuda" and self.device_features is None,
                # workers have a copy of the extra sources
                persistent_workers=workers > 0 and not self.items.changes,
                # a loader draws from its generator; the global one must stay reproducible
                generator=torch.Generator(),
            )
        return self._loader

    def read(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of `loader`; a drive that fails ends training, and is no reason to skip."""
        try:
            yield from self.loader(epoch, start)
        except OSError as error:
            raise TrainingError(
                f"the training data could not be read ({_last_line(error)}); {RESUME_ADVICE}"
            ) from error

    def to_device(self, batch: PairBatch) -> PairBatch:
        batch = batch.to(self.device)
        return batch if self.device_features is None else self.device_features.fill(batch)

    def close(self) -> None:
        """End the loader's worker processes."""
        self._loader = None


# Data of finished runs.


def _own_pixels(run: Path, config: RunConfig) -> FeaturesConfig | None:
    """The pixel features of a finished run, which does not need its pretrained model."""
    if not reads_pixels(resolve(config.model)):
        return None
    return FeaturesConfig(extractor=load_model(run, "cpu").fragments_from or "pixels")


def data_for_run(
    run: Path,
    data: str | None,
    format: str | None,
    options: dict[str, Any],
    cache: Path,
    progress: Progress,
    splits: Collection[str] | None = None,
    *,
    photos: bool = False,
    whole: bool = False,
    check: Callable[[Pairs], None] | None = None,
) -> Pairs:
    """The named data, or those of the run, with fragments by the run's extractor.

    With ``splits``, other splits of named data have no fragments: extracting them takes longest.
    With ``photos``, the data may be a folder of images without captions. With ``whole``, named data
    that state no splits are one split. ``check`` may refuse the data, if they are named before
    their features are extracted.
    """
    model_folder(run)
    config = run_config(run)
    if data is None:
        if config is None:
            raise ConfigError(f"{run} is a model without a run: name the data with --data")
        if options or format:
            raise ConfigError("--option and --format say how to read --data: name it, too")
        pairs = read_data(config, cache, progress, _own_pixels(run, config), read_dev_split(run))
        if check is not None:
            check(pairs)
        return pairs
    if photos and has_only_photos(data, format, options):
        if options:
            raise ConfigError(f"--option: {data} is a folder of photos, which has no options")
        pairs = read_photos(Path(data))
    else:
        pairs = load_pairs(data, format, options=options, cache_dir=cache, progress=progress)
    for problem in pairs.problems:
        if problem.kind in (UNRELATED, UNUSED):
            progress.say(f"note: {problem}")
    model, dev_ids = load_model(run, "cpu"), read_dev_split(run)
    if whole:
        pairs = undivided(pairs)
    if check is not None:
        check(with_dev_split(pairs, 0.0, dev_ids))
    wanted = pairs if splits is None else _only(pairs, splits, dev_from_train=bool(dev_ids))
    _check_width(model, wanted, run)
    extracted = with_fragments(
        wanted, cache, model.fragments_from or DEFAULT_EXTRACTOR, model.fragments_options, progress
    )
    pairs = replace(extracted, splits={**pairs.splits, **extracted.splits})
    # the same images may come from another folder: its dev split was not trained on
    return with_dev_split(pairs, 0.0, dev_ids)


def _check_width(model: Model, pairs: Pairs, run: Path) -> None:
    """Refuse a model of unknown features before images are extracted in vain."""
    unread = [split.name for split in pairs if split.fragments is None and split.pixels is not None]
    if model.fragments_from or not unread:
        return
    width = extractors.create(DEFAULT_EXTRACTOR, {}).dim
    if model.input_dim != width:
        raise DataError(
            f"{run}: its model reads fragments of {model.input_dim} numbers and does not say whose;"
            f" those of '{DEFAULT_EXTRACTOR}', which images get by default, have {width}; name a "
            "folder of the features that it was trained on"
        )


def _only(pairs: Pairs, names: Collection[str], dev_from_train: bool) -> Pairs:
    """The data set with the named splits; an unknown name is refused before anything is extracted.

    With ``dev_from_train``, dev is part of train if the data set has no such split.
    """
    in_train = DEV_NAMES if dev_from_train and lacks_dev(pairs) else ()
    wanted = {pairs["train" if name in in_train else name].name for name in names}
    return replace(pairs, splits={k: v for k, v in pairs.splits.items() if k in wanted})


def shared_train_split(runs: Sequence[Path], cache: Path, progress: Progress) -> Split:
    """The common training split of runs; raises if their data differ.

    Vocabulary and augmentation may differ. A saved model without a run uses the others' data.
    """
    for run in runs:
        model_folder(run)
    configs = {run: config for run in runs if (config := run_config(run)) is not None}
    if not configs:
        raise ConfigError("none of these is a run that names its data; give at least one that does")
    (first, config), *others = configs.items()
    for run, other in others:
        for key, mine in _data_keys(config).items():
            theirs = _data_keys(other)[key]
            if mine != theirs:
                raise ConfigError(
                    f"{run} and {first} were trained on different data ({key}: {theirs!r} and "
                    f"{mine!r}); a guide takes runs on the same"
                )
    return read_data(config, cache, progress, aside=read_dev_split(first)).train


def _data_keys(config: RunConfig) -> dict[str, Any]:
    tree = config.data.model_dump()
    keys = {f"data.{key}": tree[key] for key in DATA_IDENTITY_KEYS}
    if config.data.noise:
        keys["seed"] = config.seed  # it determines the shuffle
    return keys
