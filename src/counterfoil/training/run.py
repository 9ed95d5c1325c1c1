"""A run from its configuration: data, features, model, training, the test, the report."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from counterfoil.collectives import rank
from counterfoil.config import (
    EvaluationConfig,
    FeaturesConfig,
    RunConfig,
    load_config,
    model_folder,
)
from counterfoil.data.arrays import ArrayFile
from counterfoil.data.dev_split import (
    dev_note,
    lacks_dev,
    read_dev_split,
    save_dev_split,
    with_dev_split,
)
from counterfoil.data.leakage import leakage_warning, shared_by, shared_with_train
from counterfoil.data.load import is_named, load_pairs
from counterfoil.data.noise import shuffled_captions, with_noise_index
from counterfoil.data.pairs import DEV_NAMES, Pairs, Split
from counterfoil.data.problems import Severity, count_kinds
from counterfoil.device import choose_device
from counterfoil.encoders.provenance import loading_notes
from counterfoil.errors import CheckpointError, ConfigError, DataError
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.evaluation.gallery import Gallery, example_searches
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.evaluation.scoring import score_split
from counterfoil.features import with_fragments
from counterfoil.files import write_atomically
from counterfoil.models import Model, create_model, from_pretrained, resolve
from counterfoil.models.correct import can_correct
from counterfoil.models.dual import pixel_options
from counterfoil.models.explain import YARDSTICK
from counterfoil.models.start import start_from
from counterfoil.models.yardstick import measure_yardstick
from counterfoil.objectives import create_objective
from counterfoil.progress import Progress, Silent
from counterfoil.training.corrections import save_rule
from counterfoil.training.distributed import on_first_process
from counterfoil.training.loop import (
    RunResult,
    Trainer,
    evenly_spaced,
)
from counterfoil.training.report import write_report
from counterfoil.training.run_folder import locked_run, write_config

MAY_CHANGE = {
    ("data", "workers"),
    ("data", "resident"),
    ("train", "device"),
    ("train", "graphs"),
    ("train", "tensorboard"),
    ("train", "log_every"),
    ("train", "save_every"),
}


@dataclass(frozen=True)
class FinishedRun:
    """A run with its result on the test split; ``report`` is None where it was interrupted.

    ``shared`` counts images of the splits that judge it whose ids are also in the training split;
    ``notes`` are the sentences below the charts of the report.
    """

    result: RunResult
    model: Model
    pairs: Pairs
    report: RetrievalReport | None = None
    gallery: Gallery | None = None
    page: Path | None = None
    shared: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_data(
    config: RunConfig,
    cache: Path,
    progress: Progress,
    features: FeaturesConfig | None = None,
    aside: Collection[str] | None = None,
) -> Pairs:
    """The pairs of a config, every split with fragments: its own, or those of ``features``.

    Data without a dev split get one from their training images: ``aside``, if a run has saved it.
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
    pairs = with_noise(config, pairs)  # after dev was set aside, which stays as it is
    widths = {split.name: split.fragments.dim for split in pairs if split.fragments is not None}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise DataError(f"data set '{pairs.name}': features of different widths ({found})")
    return pairs


def wanted_features(config: RunConfig) -> FeaturesConfig:
    """What a config says of features; a model that reads pixels has its own way of seeing them."""
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
    """The pairs with the share of training captions shuffled that the config asks for."""
    data = config.data
    if data.noise_index:
        if data.noise:
            raise ConfigError("data.noise draws a shuffle, data.noise_index reads one: give either")
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


def _keep_noise(config: RunConfig, pairs: Pairs, folder: Path) -> None:
    """Write the shuffle beside the run: results depend on it, and another may want the same."""
    if config.data.noise:
        _, index = shuffled_captions(pairs.train, config.data.noise, config.seed)
        buffer = io.BytesIO()
        np.save(buffer, index)
        write_atomically(folder / "noise.npy", buffer.getvalue())


def _check_names(config: RunConfig) -> RunConfig:
    """The config with as many copies of the model as its objective trains, every name known."""
    copies = max(config.model.copies, create_objective(config.objective).copies)
    model = config.model.model_copy(update={"copies": copies})
    resolve(model)
    choose_device(config.train.device)
    return config.model_copy(update={"model": model})


def _read_in_turn(
    config: RunConfig, cache: Path, progress: Progress, aside: Collection[str] | None
) -> Pairs:
    """The first process draws and extracts what is missing; the others find it in the cache."""
    pairs = on_first_process(lambda: read_data(config, cache, progress, aside=aside))
    return read_data(config, cache, Silent(), aside=aside) if pairs is None else pairs


def check_splits(config: RunConfig, pairs: Pairs) -> None:
    """Refuse data without the splits that a run needs, before anything is extracted or trained."""
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
            f"data set '{pairs.name}' has no split '{name}', which {_asks(key)} "
            f"(it has: {', '.join(pairs.splits) or 'none'}){advice}"
        )


def _asks(key: str) -> str:
    return "training needs" if key == "train" else f"{key} asks for"


def skipped_kinds(pairs: Pairs) -> dict[str, int]:
    """How many items of each kind of problem were left out of the data."""
    return count_kinds([p for p in pairs.problems if p.severity is Severity.SKIP])


def shared_ids(config: RunConfig, pairs: Pairs) -> dict[str, int]:
    """Images of the splits that judge a run which it is also trained on, by split."""
    return shared_with_train(pairs, config.evaluation.split, config.evaluation.test_split)


def _leakage_warning(config: RunConfig, pairs: Pairs) -> str:
    dev, test = config.evaluation.split, config.evaluation.test_split
    return leakage_warning(shared_ids(config, pairs), (dev, test, shared_by(pairs, dev, test)))


def execute(
    config: RunConfig,
    folder: Path,
    cache: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_training: Callable[[], None] = lambda: None,
    on_trained: Callable[[], None] = lambda: None,
) -> FinishedRun:
    """Train, evaluate the best checkpoint once on the test split, write the report.

    The folder is locked meanwhile. Between ``on_training`` and ``on_trained``, ``should_stop`` is
    asked after every step; training that was stopped is not followed by the latter.
    """
    progress = progress or Silent()
    config = _check_names(config)  # a misspelt name is found before any work is done
    with locked_run(folder):
        started = resume and (folder / "last").exists()
        if config.model.start and not started:
            _check_start(Path(config.model.start))
        if rank() == 0 and not resume:
            write_config(folder, config)
        pairs = _read_in_turn(config, cache, progress, read_dev_split(folder) if resume else None)
        if rank() == 0:
            _keep_noise(config, pairs, folder)
            save_dev_split(folder, pairs, config.data.dev_share)
            if note := dev_note(pairs):
                progress.say(f"note: {note}")
        _say_skipped(pairs, progress)
        warning = _leakage_warning(config, pairs)
        if warning and rank() == 0:
            progress.say(warning)
        model = from_pretrained(folder / "last") if started else _new_model(config, pairs, progress)
        trainer = Trainer(model, pairs, config, folder, progress, should_stop)
        on_training()
        result = trainer.run(resume=started)
        if result.interrupted:
            return FinishedRun(result, model, pairs)
        on_trained()
        if rank() != 0:
            return FinishedRun(result, model, pairs)
        return _conclude(config, folder, pairs, result, progress)


def _say_skipped(pairs: Pairs, progress: Progress) -> None:
    skipped = skipped_kinds(pairs)
    if skipped:
        counts = ", ".join(f"{number} × {kind}" for kind, number in skipped.items())
        progress.say(f"left out of the data: {counts} (see: counterfoil data inspect)")


def _check_start(folder: Path) -> None:
    """A run that is not there is found before any work is done, as a misspelt name is."""
    if not folder.is_dir():
        raise CheckpointError(
            f"model.start: {folder}: no such run; train it first, name another one, or start from "
            "nothing with model.start=null"
        )
    model_folder(folder)


def _new_model(config: RunConfig, pairs: Pairs, progress: Progress) -> Model:
    """A model as the config describes it, with the weights of another run where it names one."""
    torch.manual_seed(config.seed)
    model = create_model(config.model, pairs.train, config.data)
    model.fragments_from = pairs.train.fragments.made_by if pairs.train.fragments else None
    model.fragments_options = dict(config.data.features.options)
    for note in loading_notes(model):
        progress.say(f"warning: {note}")
    if config.model.start:
        progress.say(start_from(model, config.model.start).told())
    return model


def _conclude(
    config: RunConfig, folder: Path, pairs: Pairs, result: RunResult, progress: Progress
) -> FinishedRun:
    settings = config.evaluation
    best = from_pretrained(folder / "best").to(choose_device(config.train.device))
    save_yardstick(folder, best, pairs[settings.split])
    if can_correct(best):
        best.correction_rule = save_rule(folder, best, pairs[settings.split], progress)
    name = settings.test_split if settings.test_split in pairs else settings.split
    judged = pairs[name]
    if name == settings.split:  # no other data than what chose the epoch, and no more of it
        judged = evenly_spaced(judged, settings.images)
    found = score_split(best, judged, settings.batch_size, progress)
    report = report_scores(
        [found],
        name,
        folds=settings.folds,
        bootstrap=settings.bootstrap,
        captions=found.captions(judged),
    )
    gallery = example_searches(found, judged, seed=config.seed)
    write_atomically(folder / "results.json", report.to_json())
    notes = [
        f"Best dev RSUM {result.best_rsum:.1f} at epoch {result.best_epoch}; "
        f"{result.steps} updates in {result.seconds:.0f} s."
    ]
    if result.skipped or found.skipped:
        notes.append(f"Images skipped: {result.skipped} in training, {len(found.skipped)} in test.")
    if kinds := skipped_kinds(pairs):
        counts = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
        notes.append(f"Left out of the data: {counts}.")
    if warning := _leakage_warning(config, pairs):
        notes.append(f"{warning[0].upper()}{warning[1:]}.")
    if twins := report.warning():
        notes.append(f"{twins[0].upper()}{twins[1:]}.")
    page = write_report(folder, config, report, judged, gallery, notes)
    shared = shared_ids(config, pairs)
    result = replace(result, folder=folder)
    return FinishedRun(result, best, pairs, report, gallery, page, shared, tuple(notes))


def save_yardstick(folder: Path, best: Model, dev: Split) -> None:
    """Measure what the scores of a trained model usually are, and keep it with the run."""
    best.yardstick = measure_yardstick(best, dev)
    if best.yardstick is None:  # too few pairs
        (folder / YARDSTICK).unlink(missing_ok=True)
    else:
        write_atomically(folder / YARDSTICK, best.yardstick.to_json())


def located(config: RunConfig) -> RunConfig:
    """The config with paths that hold wherever it is read from."""
    data = config.data
    change = {
        key: str(Path(value).resolve())
        for key, value in (("source", data.source), ("vocabulary", data.vocabulary))
        if value and Path(value).exists() and not (key == "source" and is_named(value, data.format))
    }
    if data.noise_index:
        change["noise_index"] = str(Path(data.noise_index).resolve())
    start = config.model.start
    placed: dict[str, Any] = {"start": str(Path(start).resolve())} if start else {}
    for part in ("image", "text", "matcher"):
        placed[part] = _located_pretrained(getattr(config.model, part))
    return config.model_copy(
        update={
            "data": data.model_copy(update=change),
            "model": config.model.model_copy(update=placed),
            "objective": _located_options(config.objective),
        }
    )


def _located_pretrained(part: dict[str, Any]) -> dict[str, Any]:
    """A part's options, with the folder of its pretrained weights as an absolute path."""
    name = part.get("pretrained")
    here = isinstance(name, str) and bool(name) and Path(name).is_dir()
    return {**part, "pretrained": str(Path(str(name)).resolve())} if here else part


def _located_options(objective: dict[str, Any]) -> dict[str, Any]:
    """Options of objectives that name a file or a run, as absolute paths.

    A path is known by its separator: ``rules`` is a name even where a folder is called so.
    """
    return {
        name: {
            key: str(Path(value).resolve())
            if isinstance(value, str) and os.sep in value and Path(value).exists()
            else value
            for key, value in options.items()
        }
        if isinstance(options, dict)
        else options
        for name, options in objective.items()
    }


def resumed_config(folder: Path, asked: RunConfig | None) -> RunConfig:
    """The config a run was started with; what is asked for now may differ in a few keys only."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a run (no config.yaml there), nothing to resume")
    saved = load_config(path)
    if asked is None:
        return saved
    asked = _check_names(asked)
    before, now = saved.model_dump(), asked.model_dump()
    changed = [
        (section, key)
        for section, values in now.items()
        if isinstance(values, dict)
        for key in dict.fromkeys([*values, *before[section]])
        if before[section].get(key) != values.get(key)
    ]
    if asked.seed != saved.seed:
        changed.append(("seed", ""))
    refused = [".".join(filter(None, place)) for place in changed if place not in MAY_CHANGE]
    if refused:
        raise ConfigError(
            f"{folder}: the run was started with another {', '.join(refused)}; "
            "resume it without these, or choose another folder with --out"
        )
    return asked
