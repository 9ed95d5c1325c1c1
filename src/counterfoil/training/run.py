"""Executes a run from its config: data, features, model, training, test, report."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from counterfoil.core import zoo
from counterfoil.core.config import RunConfig, model_folder
from counterfoil.core.distributed import on_first_process, rank
from counterfoil.core.errors import CheckpointError, ConfigError, CounterfoilError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.splits import (
    dev_note,
    evenly_spaced,
    leakage_warning,
    likely_typos,
    read_dev_split,
    save_dev_split,
    shared_by,
    shared_with_train,
    shuffled_captions,
)
from counterfoil.encoders.bert import loading_notes
from counterfoil.evaluation.corrections import choose_rule
from counterfoil.evaluation.evaluate import Gallery, example_searches, report_scores
from counterfoil.evaluation.forgetting import REPORT_FILE, compare_with_start
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.evaluation.words.evaluate import choose_word_method
from counterfoil.features.extractors import with_options
from counterfoil.models import create_model, from_pretrained
from counterfoil.models.correct import can_correct
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.models.match import YARDSTICK
from counterfoil.models.model import Model
from counterfoil.models.warm_start import start_from
from counterfoil.models.yardstick import measure_yardstick
from counterfoil.plots.charts import save_figure, to_svg
from counterfoil.scoring.encode import score_split
from counterfoil.training.report import Section, write_report
from counterfoil.training.run_data import (
    data_for_run,
    read_data,
    skipped_kinds,
    skipped_notice,
)
from counterfoil.training.run_folder import (
    RULE,
    checked_config,
    locked_run,
    run_config,
    write_config,
)
from counterfoil.training.trainer import RunResult, Trainer

FORGETTING_TITLE = "Gained and lost against the start"
FORGETTING_IMAGES = 1000
"""Images of the comparison with the start of a run."""


@dataclass(frozen=True)
class FinishedRun:
    """A run with its result on the test split; ``report`` is None if it was interrupted.

    ``shared`` counts the evaluation images whose ids are also in the training split; ``notes`` are
    the sentences below the charts of the report.
    """

    result: RunResult
    model: Model
    pairs: Pairs
    report: RetrievalReport | None = None
    gallery: Gallery | None = None
    page: Path | None = None
    shared: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def save_noise(config: RunConfig, pairs: Pairs, folder: Path) -> None:
    """Save the shuffle of captions with the run, so that others can reuse it."""
    if config.data.noise:
        _, index = shuffled_captions(pairs.train, config.data.noise, config.seed)
        buffer = io.BytesIO()
        np.save(buffer, index)
        write_atomically(folder / "noise.npy", buffer.getvalue())


def _read_in_turn(
    config: RunConfig, cache: Path, progress: Progress, aside: Collection[str] | None
) -> Pairs:
    """The first process extracts missing features; the others read them from the cache."""
    pairs = on_first_process(lambda: read_data(config, cache, progress, aside=aside))
    return read_data(config, cache, Silent(), aside=aside) if pairs is None else pairs


def shared_ids(config: RunConfig, pairs: Pairs) -> dict[str, int]:
    """Counts, per evaluation split, of images that are also in the training split."""
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

    The folder is locked meanwhile. ``on_training`` is called before the first step, ``on_trained``
    after the last, unless ``should_stop``, which is called after every step, stopped the training.
    """
    progress = progress or Silent()
    config = checked_config(config)  # find misspelt names before any work
    with locked_run(folder):
        started = resume and (folder / "last").exists()
        if config.model.init_from and not started:
            _check_start(config.model.init_from, cache)
        if rank() == 0 and not resume:
            write_config(folder, config)
        pairs = _read_in_turn(config, cache, progress, read_dev_split(folder) if resume else None)
        if rank() == 0:
            if not started:  # what a run began with stays as it was, also if the data have changed
                save_noise(config, pairs, folder)
                save_dev_split(folder, pairs, config.data.dev_share)
            for note in [*likely_typos(pairs), *filter(None, [dev_note(pairs)])]:
                progress.say(f"note: {note}")
        if notice := skipped_notice(pairs):
            progress.say(notice)
        warning = _leakage_warning(config, pairs)
        if warning and rank() == 0:
            progress.say(warning)
        if started:
            model = from_pretrained(folder / "last")
        else:
            model = new_model(config, pairs, progress, cache)
        trainer = Trainer(model, pairs, config, folder, progress, should_stop, cache)
        on_training()
        result = trainer.run(resume=started)
        if result.interrupted:
            return FinishedRun(result, model, pairs)
        on_trained()
        if rank() != 0:
            return FinishedRun(result, model, pairs)
        return _conclude(config, folder, pairs, result, progress, cache)


def _check_start(source: str, cache: Path) -> None:
    """Refuse a missing run before any work is done."""
    folder = zoo.resolve(source, cache=cache) if zoo.is_pretrained(source) else Path(source)
    if not folder.is_dir():
        raise CheckpointError(
            f"model.init_from: {folder}: no such run; train it first, name another one, or start "
            "from nothing with model.init_from=null"
        )
    model_folder(folder)


def new_model(config: RunConfig, pairs: Pairs, progress: Progress, cache: Path) -> Model:
    """A new model of the config, with the weights of another run if it names one."""
    torch.manual_seed(config.seed)
    model = create_model(config.model, pairs.train, config.data)
    model.fragments_from = pairs.train.fragments.made_by if pairs.train.fragments else None
    features = config.data.features
    if model.fragments_from == with_options(features.extractor, features.options):
        model.fragments_from, model.fragments_options = features.extractor, dict(features.options)
    for note in loading_notes(model):
        progress.say(f"warning: {note}")
    if config.model.init_from:
        progress.say(start_from(model, config.model.init_from, cache).note())
    return model


def _conclude(
    config: RunConfig,
    folder: Path,
    pairs: Pairs,
    result: RunResult,
    progress: Progress,
    cache: Path,
) -> FinishedRun:
    settings = config.evaluation
    best = from_pretrained(folder / "best").to(choose_device(config.train.device))
    save_yardstick(folder, best, pairs[settings.split])
    if can_correct(best):
        best.correction_rule = save_rule(folder, best, pairs[settings.split], progress)
    name = settings.test_split if settings.test_split in pairs else settings.split
    judged = pairs[name]
    if name == settings.split:  # evaluated on dev: use the same images as during training
        judged = evenly_spaced(judged, settings.max_images)
    scored = score_split(best, judged, settings.batch_size, progress)
    report = report_scores(
        [scored],
        name,
        folds=settings.folds,
        bootstrap=settings.bootstrap,
        captions=scored.captions(judged),
    )
    gallery = example_searches(scored, seed=config.seed)
    notes = [
        f"Best RSUM {result.best_rsum:.1f} on {settings.split}, at epoch {result.best_epoch}; "
        f"{result.steps} updates in {result.seconds:.0f} s."
    ]
    if result.skipped or scored.skipped:
        notes.append(
            f"Images skipped: {result.skipped} in training, {len(scored.skipped)} in test."
        )
    if kinds := skipped_kinds(pairs):
        counts = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
        notes.append(f"Left out of the data: {counts}.")
    if warning := _leakage_warning(config, pairs):
        notes.append(f"{warning[0].upper()}{warning[1:]}.")
    if twins := report.warning():
        notes.append(f"{twins[0].upper()}{twins[1:]}.")
    sections = forgetting_section(config, folder, best, judged, progress, cache)
    # A run with results counts as finished: whatever else tables read is written before.
    write_atomically(folder / "results.json", report.to_json())
    page = write_report(folder, config, report, judged, gallery, notes, sections)
    shared = shared_ids(config, pairs)
    result = replace(result, folder=folder)
    return FinishedRun(result, best, pairs, report, gallery, page, shared, tuple(notes))


def forgetting_section(
    config: RunConfig,
    folder: Path,
    best: Model,
    split: Split,
    progress: Progress,
    cache: Path | None = None,
) -> list[Section]:
    """What a fine-tuned run gained and lost against its start; nothing without a start."""
    if not config.model.init_from:
        return []
    start = Path(config.model.init_from)  # a folder, or the name of a pretrained model
    names, resamples = (start.name, folder.name), config.evaluation.bootstrap
    try:  # the start may be gone since the run began; a finished run must not fail by that
        before = from_pretrained(model_folder(zoo.resolve(start, cache=cache))).to(best.device)
        report = compare_with_start(
            before,
            best,
            evenly_spaced(split, FORGETTING_IMAGES),
            names=names,
            bootstrap=resamples,
            progress=progress,
        )
    except CounterfoilError as error:
        progress.say(f"not compared with {start.name}: {error}")
        return [Section(FORGETTING_TITLE, [f"Not compared with {start.name}: {error}."])]
    write_atomically(folder / REPORT_FILE, report.to_json())
    progress.say(f"against {start.name}: {report.sentence()}")
    figure = report.chart()
    save_figure(figure, folder / "forgetting.png")
    sentences = [f"{report.headline()}. {report.sentence()}.", f"{report.footnote()}."]
    return [Section(FORGETTING_TITLE, sentences, report.rows(), to_svg(figure))]


def save_yardstick(folder: Path, best: Model, dev: Split) -> None:
    """Measure the yardstick of a trained model on dev, and save it with the run."""
    method = choose_word_method(best, dev)
    best.yardstick = measure_yardstick(best, dev, word_method=method)
    if best.yardstick is None:  # too few pairs
        (folder / YARDSTICK).unlink(missing_ok=True)
    else:
        write_atomically(folder / YARDSTICK, best.yardstick.to_json())


def save_rule(folder: Path, model: Model, dev: Split, progress: Progress) -> CorrectionRule:
    """Choose a rule on dev and write it into a run folder; unusable if no caption has a foil."""
    reason = ""
    try:
        rule = choose_rule(model, dev, progress=progress)
    except DataError as error:  # such as captions without a word that a rule can replace
        rule, reason = CorrectionRule(usable=False), f": {error}"
    write_atomically(folder / RULE, json.dumps(asdict(rule), indent=2))
    progress.say(f"corrections: {_summary(rule, dev.name)}{reason}")
    return rule


def _summary(rule: CorrectionRule, split: str) -> str:
    if not rule.usable:
        return f"none will be suggested; {rule.obstacle()}"
    return (
        f"{rule.precision:.0%} of {rule.made} changes were right on {split} (threshold "
        f"{rule.threshold:g}, margin {rule.margin:.4g}); measure them on test: "
        "counterfoil correct RUN --measure"
    )


def choose_run_rule(run: Path, model: Model, cache: Path, progress: Progress) -> CorrectionRule:
    """Choose the rule of a finished run again, on the dev split of its own data."""
    config = run_config(run)
    if config is None:
        raise ConfigError(f"{run}: a model without a run has no dev split; --choose needs a run")
    pairs = data_for_run(run, None, None, {}, cache, progress)
    return save_rule(run, model, pairs[config.evaluation.split], progress)
