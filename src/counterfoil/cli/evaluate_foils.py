"""`counterfoil evaluate-foils` and `evaluate-judgements`: a model against foils and people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import DataChoice, check_inputs
from counterfoil.cli.output import print_json, print_line, print_table, progress, to_json
from counterfoil.core.errors import ConfigError
from counterfoil.core.zoo import is_pretrained, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Split
    from counterfoil.evaluation.foils.fluency import Fluency
    from counterfoil.evaluation.foils.report import FoilReport
    from counterfoil.models.model import Model


OWN = "own"


def evaluate_foils(
    context: typer.Context,
    run: opt.Run,
    foils: Annotated[
        list[str] | None,
        typer.Option(
            "--foils",
            help="Source of the foils: 'rules' (or 'rules:noun,swap'), a JSONL file, the folder "
            "of a run that writes them, or 'own' for RUN itself. Repeatable, one report each. "
            "Default: rules.",
        ),
    ] = None,
    data: opt.Data = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    max_captions: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate a random sample of this many captions. Default: all."),
    ] = None,
    foils_per_caption: Annotated[int, typer.Option(min=1, help="Foils per caption.")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the captions sampled and of the foils.")
    ] = 1,
    masks: opt.Masks = 5,
    samples: opt.Samples = 5,
    temperature: opt.Temperature = 1.5,
    masking: opt.Masking = "scene-graph",
    lm: Annotated[
        str | None,
        typer.Option(
            "--lm",
            help="Also report the perplexity of the foils under a language model: a folder, or "
            "'own' for RUN's own language-model head.",
        ),
    ] = None,
    by_kind: Annotated[
        bool,
        typer.Option("--by-kind", help="Also report per kind of change: colors, numbers …"),
    ] = False,
    device: opt.Device = "auto",
    markdown: opt.Markdown = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Evaluate a model on foils: is the true caption scored higher, are wrong words found?

    Every model can be evaluated on foils from every source. Word discrimination and correction need
    the heads of TAGS-DC; the share of true negatives needs drawn scenes.

    [bold]Examples[/]

      counterfoil evaluate-foils runs/scenes-rvse-mlp
      counterfoil evaluate-foils runs/scenes-tags-dc --foils rules \\
        --foils own --lm own
      counterfoil evaluate-foils runs/scenes-uniter-small \\
        --foils runs/scenes-tags
    """
    check_inputs([run], data, format)
    from counterfoil.evaluation.foils.metrics import judge_foils
    from counterfoil.evaluation.foils.sets import FoilChoice, foils_by, is_rules
    from counterfoil.training.run_folder import load_model

    data_choice = DataChoice(data, format, option, cache, quiet=as_json or markdown)
    bars = data_choice.progress
    _refuse_useless(context, foils or ["rules"], cache)
    unit: Literal["graph", "word"] = "graph" if masking == "scene-graph" else "word"
    choice = FoilChoice(foils_per_caption, max_captions, seed, masks, samples, temperature, unit)
    model, pairs = load_model(run, device), data_choice.read(run, [split])[split]
    fluency = _fluency(lm, model, bars)
    reports = []
    for name in foils or ["rules"]:
        named = resolve(name, cache=cache) if is_pretrained(name) else name
        source = str(run if name == OWN else named)
        by_run = not is_rules(source) and Path(source).is_dir()
        theirs = data_choice.read(Path(source), [split])[split] if by_run else pairs
        if list(theirs.ids) != list(pairs.ids) or theirs.texts != pairs.texts:
            raise ConfigError(
                f"{source} and {run} have different images or captions in split '{split}'; name "
                "one data set for both with --data"
            )
        made = foils_by(source, theirs, choice, lambda path: load_model(path, device), bars)
        reports.append(
            judge_foils(model, pairs, made, fluency=fluency, by_kind=by_kind, progress=bars)
        )
    _show(reports, markdown, as_json)


MODEL_MADE = ("masks", "samples", "temperature", "masking")
"""Options of foils that a model writes."""


def _refuse_useless(context: typer.Context, sources: list[str], cache: Path) -> None:
    from counterfoil.evaluation.foils.sets import is_rules

    def is_written(source: str) -> bool:
        named = resolve(source, cache=cache) if is_pretrained(source) else Path(source)
        return source == OWN or (not is_rules(source) and named.is_dir())

    if not any(map(is_written, sources)):
        opt.refuse_useless(context, MODEL_MADE, "no model writes these foils (see --foils)")


def _fluency(lm: str | None, model: Model, bars: Progress) -> Fluency | None:
    if lm is None:
        return None
    from counterfoil.evaluation.foils.fluency import RunFluency, TransformersFluency

    return RunFluency(model, progress=bars) if lm == OWN else TransformersFluency(lm, model.device)


def _show(reports: list[FoilReport], markdown: bool, as_json: bool) -> None:
    if as_json:
        print_json([report.as_dict() for report in reports])
        return
    for report in reports:
        if markdown:
            typer.echo(report.to_markdown())
        else:
            print_table(report.rows(), title=report.headline())
            for table in (report.kind_rows(), report.true_kind_rows()):
                if table:
                    print_table(table)
            print_line(report.notes())


def show_forgetting(
    runs: Sequence[Path],
    start: Path | None,
    read: Callable[[Path], Split],
    classes: Path | None,
    bootstrap: int,
    device: str,
    cache: Path,
    out: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """`counterfoil evaluate RUN --forgetting`: a run against the model it started from."""
    from counterfoil.core.storage.atomic import write_atomically
    from counterfoil.evaluation.forgetting import compare_with_start
    from counterfoil.plots.charts import save_figure
    from counterfoil.training.run_folder import load_model

    if len(runs) != 1:
        raise ConfigError(f"--forgetting compares one run with its start, got {len(runs)} runs")
    (run,) = runs
    bars = progress(quiet=as_json or markdown)
    begin, name = (start, start.resolve().name) if start else _start_of(run, cache, bars)
    split = read(run)
    models = load_model(begin, device), load_model(run, device)
    report = compare_with_start(
        *models,
        split,
        names=(name, run.resolve().name),
        classes=classes,
        bootstrap=bootstrap,
        progress=bars,
    )
    if out is not None and out.suffix.lower() == ".png":
        save_figure(report.chart(), out)
    elif out is not None:
        page = report.to_markdown() if out.suffix.lower() == ".md" else to_json(report.as_dict())
        write_atomically(out, page)
    if as_json:
        print_json(report.as_dict())
    elif markdown:
        typer.echo(report.to_markdown())
    else:
        print_table(report.rows(), title=report.headline())
        print_line(report.sentence())
        print_line(report.footnote())


def _start_of(run: Path, cache: Path, bars: Progress) -> tuple[Path, str]:
    """Folder and name of the model that a run started from; downloaded into ``cache`` if needed."""
    from counterfoil.training.run_folder import run_config

    config = run_config(run)
    if config is None or not config.model.init_from:
        raise ConfigError(
            f"{run}: did not start from another model (model.init_from); name one with --start"
        )
    source = config.model.init_from
    start = resolve(source, cache=cache, progress=bars) if is_pretrained(source) else Path(source)
    if not start.is_dir():
        raise ConfigError(f"{run}: started from {source}, which is gone; name a copy with --start")
    return start, Path(source).name


def evaluate_judgements(
    runs: opt.Ensemble,
    judgements: Annotated[
        Path,
        typer.Argument(
            help="Judgement file of Flickr8k: ExpertAnnotations.txt or CrowdFlowerAnnotations.txt."
        ),
    ],
    data: opt.Data = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    standardize: Annotated[
        bool,
        typer.Option(
            "--standardize",
            help="Divide each run's scores by their standard deviation before averaging.",
        ),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Correlate scores with human judgements of Flickr8k: Kendall's τ, as CLIPScore reports it.

    The kind of file is detected from its numbers. Expert ratings (three per pair): τ-c over all
    ratings, without an image's own captions. Crowd votes (share of yes): τ-b.

    [bold]Examples[/]

      counterfoil evaluate-judgements runs/f8k ExpertAnnotations.txt
      counterfoil evaluate-judgements runs/a runs/b ExpertAnnotations.txt
      counterfoil evaluate-judgements runs/f8k CrowdFlowerAnnotations.txt \\
        --data flickr8k/
    """
    if standardize and len(runs) < 2:
        raise ConfigError("--standardize is for ensembles: name two or more runs")
    check_inputs(runs, data, format)
    from counterfoil.evaluation.judgements import evaluate_judgements
    from counterfoil.training.run_folder import load_model

    pairs = DataChoice(data, format, option, cache, quiet=as_json).read(runs[0])
    report = evaluate_judgements(
        [load_model(run, device) for run in runs],
        pairs,
        judgements,
        progress(quiet=as_json),
        standardize=standardize,
    )
    if as_json:
        print_json(report.as_dict())
        return
    print_table(report.rows())
    print_line(report.headline())
