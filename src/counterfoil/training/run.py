"""A run from its configuration: data, features, model, training, the test, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from counterfoil.collectives import rank
from counterfoil.config import RunConfig, load_config
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import Pairs
from counterfoil.data.problems import count_kinds
from counterfoil.errors import CheckpointError, ConfigError
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.evaluation.gallery import Gallery, example_searches
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.evaluation.scoring import score_split
from counterfoil.features import with_fragments
from counterfoil.files import write_atomically
from counterfoil.models import Model, create_model, from_pretrained
from counterfoil.objectives import create_objective
from counterfoil.progress import Progress, Silent
from counterfoil.training.loop import RunResult, Trainer, choose_device
from counterfoil.training.report import write_report

MAY_CHANGE = {
    ("data", "workers"),
    ("train", "device"),
    ("train", "tensorboard"),
    ("train", "log_every"),
    ("train", "save_every"),
}


@dataclass(frozen=True)
class FinishedRun:
    """A run with its result on the test split; ``report`` is None where it was interrupted."""

    result: RunResult
    model: Model
    pairs: Pairs
    report: RetrievalReport | None = None
    gallery: Gallery | None = None
    page: Path | None = None


def read_data(config: RunConfig, cache: Path, progress: Progress) -> Pairs:
    """The pairs of a config, every split with fragments."""
    pairs = load_pairs(
        config.data.source,
        config.data.format,
        options=config.data.options,
        cache_dir=cache,
        progress=progress,
    )
    features = config.data.features
    return with_fragments(pairs, cache, features.extractor, features.options, progress)


def execute(
    config: RunConfig,
    folder: Path,
    cache: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FinishedRun:
    """Train, evaluate the best checkpoint once on the test split, write the report."""
    progress = progress or Silent()
    create_objective(config.objective)  # a misspelt objective is found before any work is done
    pairs = read_data(config, cache, progress)
    skipped = count_kinds(pairs.problems)
    if skipped:
        counts = ", ".join(f"{number} × {kind}" for kind, number in skipped.items())
        progress.say(f"problems in the data: {counts} (see: counterfoil data inspect)")
    started = resume and (folder / "last").exists()
    if started:
        model = from_pretrained(folder / "last")
    else:
        torch.manual_seed(config.seed)
        model = create_model(config.model, pairs.train, config.data)
        model.fragments_from = pairs.train.fragments.made_by if pairs.train.fragments else None
    trainer = Trainer(model, pairs, config, folder, progress, should_stop)
    result = trainer.run(resume=started)
    if result.interrupted or rank() != 0:
        return FinishedRun(result, model, pairs)
    return _conclude(config, folder, pairs, result, progress)


def _conclude(
    config: RunConfig, folder: Path, pairs: Pairs, result: RunResult, progress: Progress
) -> FinishedRun:
    settings = config.evaluation
    best = from_pretrained(folder / "best").to(choose_device(config.train.device))
    name = settings.test_split if settings.test_split in pairs else settings.split
    found = score_split(best, pairs[name], settings.batch_size, progress)
    report = report_scores([found], name, folds=settings.folds, bootstrap=settings.bootstrap)
    gallery = example_searches(found, pairs[name], seed=config.seed)
    write_atomically(folder / "results.json", report.to_json())
    notes = [
        f"Best dev RSUM {result.best_rsum:.1f} at epoch {result.best_epoch}; "
        f"{result.steps} updates in {result.seconds:.0f} s."
    ]
    if result.skipped or found.skipped:
        notes.append(f"Items skipped: {result.skipped} in training, {len(found.skipped)} in test.")
    page = write_report(folder, config, report, pairs[name], gallery, notes)
    return FinishedRun(replace(result, folder=folder), best, pairs, report, gallery, page)


def resumed_config(folder: Path, asked: RunConfig | None) -> RunConfig:
    """The config a run was started with; what is asked for now may differ in a few keys only."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a run (no config.yaml there), nothing to resume")
    saved = load_config(path)
    if asked is None:
        return saved
    changed = [
        (section, key)
        for section, values in asked.model_dump().items()
        if isinstance(values, dict)
        for key, value in values.items()
        if saved.model_dump()[section].get(key) != value
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


def is_finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError):
        return False
