"""`counterfoil train`: a recipe and overrides to a trained, evaluated, reported run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.output import print_json, print_line, print_table, progress
from counterfoil.cli.recipes import complete_recipe
from counterfoil.cli.signals import StopSignals
from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.core.printable import plural
from counterfoil.core.recipes import SUFFIXES, find_recipe, recipe_name
from counterfoil.core.unknown_names import check_names
from counterfoil.core.unread_options import refuse_unread

if TYPE_CHECKING:
    from counterfoil.training.run import FinishedRun


RUNS = Path("runs")
ADVICE = "wait for it, stop it, or choose another folder with --out"
EXISTING_RUN_ADVICE = (
    "continue it with --resume, choose another folder with --out, or --overwrite it"
)


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe: a name (`counterfoil recipes` lists them) or a YAML file. Without one, "
            "overrides change the default settings (`--show-config` prints them). With --resume it "
            "may also be the run folder.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Config overrides: train.epochs=5 objective=triplet model.embed_size=256"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Run folder to write. Default: runs/<recipe>[-<overrides>], e.g. "
            "runs/scenes-naaf.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue a run from its last checkpoint: --resume RUN. Without RUN: the latest "
            "unfinished one in runs/. A recipe is optional and must be that of the run.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an existing run in the folder first.")
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show-config",
            help="Print the config with the default of every key, then exit. `counterfoil models "
            "NAME` prints those of an objective's or a matcher's own options.",
        ),
    ] = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Train a model, evaluate its best checkpoint on the test split, and write a report.

    The run folder contains config.yaml, metrics.jsonl, the checkpoints last/ and best/,
    results.json, plots and report.html. Ctrl-C (exit code 130) and SIGTERM (143) save a checkpoint
    and stop; --resume then gives the same result as an uninterrupted run. Exit code 8: another
    process is training in the folder.

    [bold]Examples[/]

      counterfoil train scenes/rvse-mlp
      counterfoil train scenes/rvse-mlp objective=triplet train.epochs=5
      counterfoil train --resume runs/scenes-rvse-mlp
      counterfoil train scenes/naaf --show-config
      torchrun --nproc-per-node 2 -m counterfoil train scenes/rvse-mlp
    """
    if resume and overwrite:
        raise ConfigError("--resume continues a run, --overwrite replaces it: give one of them")
    config, folder = _plan(recipe, list(overrides or []), out, resume, show)
    if show:
        typer.echo(config.to_yaml())
        return
    from counterfoil.core.distributed import on_first_process, processes
    from counterfoil.training.run import execute
    from counterfoil.training.run_folder import locked_run, make_room

    signals = StopSignals()
    with processes(dict(os.environ), _report) as first, locked_run(folder, ADVICE):
        if not resume:
            on_first_process(lambda: make_room(folder, overwrite, EXISTING_RUN_ADVICE))
        bars = progress(quiet=as_json or not first)
        for note in _objective_notes(recipe, config, resume):
            bars.say(f"note: {note}")
        finished = execute(
            config,
            folder,
            cache,
            resume=resume,
            progress=bars,
            should_stop=lambda: signals.stop_requested,
            on_training=signals.listen,
            on_trained=signals.stop_listening,
        )
        if first:
            _summarize(finished, config.evaluation.split, as_json)
    if finished.result.interrupted:
        raise typer.Exit(signals.exit_code)


def _report(message: str) -> None:
    print_line(f"error: {message}", stderr=True)


def _plan(
    recipe: str | None, overrides: list[str], out: Path | None, resume: bool, show: bool
) -> tuple[RunConfig, Path]:
    """Config and run folder of the arguments; typos are found before torch is imported."""
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        overrides.insert(0, recipe)
        recipe = None
    recipe, overrides, out = _split_arguments(recipe, overrides, out, resume)
    if resume and out is None and recipe is None and not overrides:
        out = _latest_unfinished()
    if not resume and not show and recipe is None and not overrides:
        raise ConfigError(
            "nothing to train: name a recipe, such as scenes/naaf (counterfoil recipes lists them)"
        )
    folder = out or RUNS / _slug(recipe, overrides)
    saved = folder / "config.yaml"
    if resume and not saved.is_file() and recipe is None:
        raise CheckpointError(f"{folder}: not a run (it has no config.yaml); nothing to resume")
    config = load_config(saved if resume and recipe is None else recipe, overrides)
    check_names(config)
    if not resume:  # a run of an older version may have been started with such options
        refuse_unread(config)
    if not show:
        _check_inputs(config, resume)
    from counterfoil.training.run_folder import resolve_paths, resumed_config

    if not resume or not saved.is_file():  # or nothing was written yet
        return resolve_paths(config), folder
    return resumed_config(folder, resolve_paths(config)), folder


def _check_inputs(config: RunConfig, resume: bool) -> None:
    """Refuse data, extractors and files that do not exist; a run has its own vocabulary."""
    from counterfoil.data.load import check_source
    from counterfoil.features.extractors import extractors, split_full_name

    data = config.data
    check_source(data.source, data.format, data.options)
    extractor, _ = split_full_name(data.features.extractor)
    extractors.check(extractor, data.features.options, where="data.features.options")
    if not resume:
        _check_files(config)


def _check_files(config: RunConfig) -> None:
    """Refuse files that a config names but that do not exist, before features are extracted."""
    data = config.data
    for key, path in (("vocabulary", data.vocabulary), ("noise_index", data.noise_index)):
        if path and not Path(path).is_file():
            raise DataError(f"data.{key}: {path}: no such file")
    for name, options in config.objective.items():
        guide = options.get("guide") if isinstance(options, Mapping) else None
        if isinstance(guide, str) and guide and not (Path(guide) / "guide.json").is_file():
            raise DataError(
                f"objective.{name}.guide: {guide}: not a guide (no guide.json there); make one "
                f"with: counterfoil guide build RUN … --out {guide}"
            )


def _split_arguments(
    recipe: str | None, words: list[str], out: Path | None, resume: bool
) -> tuple[str | None, list[str], Path | None]:
    """Recipe, overrides and run folder; with --resume, an argument may be the run folder."""
    folders = [Path(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if recipe is not None and _names_run(recipe, resume):
        folders.insert(0, Path(recipe))
        recipe = None
    if not folders:
        return recipe, overrides, out
    if not resume:
        known = "is a folder" if folders[0].is_dir() else "is neither a recipe nor key=value"
        raise ConfigError(
            f"{folders[0]} {known}; overrides look like train.epochs=5; to continue a run: "
            "counterfoil train --resume RUN"
        )
    if out is not None:
        folders.append(out)
    if len({folder.resolve() for folder in folders}) > 1:
        raise ConfigError(
            f"--resume continues one run, got {', '.join(map(str, folders))}: name one folder"
        )
    if not folders[0].exists():
        raise CheckpointError(f"{folders[0]}: no run there to resume")
    return recipe, overrides, folders[0]


def _names_run(word: str, resume: bool) -> bool:
    """Whether the first argument is a run folder rather than a recipe."""
    path = Path(word)
    if recipe_name(path) is not None:  # a folder may have that name: 'photos', say
        return resume and (path / "config.yaml").is_file()
    return path.is_dir() or (resume and not path.exists() and path.suffix not in SUFFIXES)


def _objective_notes(recipe: str | None, config: RunConfig, resume: bool) -> list[str]:
    """What changes if an objective on the command line replaces the recipe's."""
    if resume or recipe is None or not find_recipe(Path(recipe)).is_file():
        return []
    from counterfoil.training.services import objective_notes

    return objective_notes(load_config(recipe), config)


def _slug(recipe: str | None, overrides: list[str]) -> str:
    name = (recipe_name(Path(recipe)) or Path(recipe).stem) if recipe else "run"
    parts = [name.replace("/", "-"), *overrides]
    return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", "-".join(parts)).strip("-_")[:120]


def _latest_unfinished() -> Path:
    from counterfoil.training.run_folder import is_finished

    runs = [path.parent for path in RUNS.glob("*/config.yaml") if not is_finished(path.parent)]
    if not runs:
        raise ConfigError("no unfinished run in runs/; name one: counterfoil train --resume FOLDER")
    return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime)


def _summarize(finished: FinishedRun, split: str, as_json: bool) -> None:
    """Print the results; ``split`` selected the best checkpoint."""
    from counterfoil.training.run_data import skipped_kinds

    result, report = finished.result, finished.report
    if report is None:
        print_line(
            f"interrupted after {result.steps} updates; continue with: "
            f"counterfoil train --resume {result.folder}",
            stderr=True,
        )
        return
    if as_json:
        print_json(
            {
                "run": str(result.folder),
                "best_dev_rsum": result.best_rsum,
                "selected_on": split,
                "best_epoch": result.best_epoch,
                "steps": result.steps,
                "seconds": round(result.seconds, 1),
                "skipped": result.skipped,
                "left_out": skipped_kinds(finished.pairs),
                "shared_with_train": finished.shared,
                "report": str(finished.page),
                "results": report.as_dict(),
            }
        )
        return
    if report.warning():
        print_line(report.warning(), stderr=True)
    for title, rows in report.tables():
        print_table(rows, title=title)
    left_out = sum(skipped_kinds(finished.pairs).values())
    print_line(
        f"{result.steps} updates in {result.seconds:.0f} s; best RSUM {result.best_rsum:.1f} on "
        f"{split}, at epoch {result.best_epoch}; {plural(result.skipped, 'image')} skipped in "
        f"training, {plural(left_out, 'item')} left out of the data"
    )
    print_line(f"report: {finished.page}")
