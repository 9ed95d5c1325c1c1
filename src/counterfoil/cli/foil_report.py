"""`counterfoil foil-report` and `judge`: a model on foils, and beside the judgements of people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterfoil.cli.output import (
    ABOVE_0,
    CACHE_OPTION,
    JSON_OPTION,
    FormatOption,
    SourceOptions,
    check_inputs,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
)
from counterfoil.core.errors import ConfigError

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Split
    from counterfoil.evaluation.foils.fluency import Fluency
    from counterfoil.evaluation.foils.report import FoilReport
    from counterfoil.models.model import Model


OWN = "own"


def foil_report(
    run: Annotated[Path, typer.Argument(help="Run or model folder that is judged.")],
    foils: Annotated[
        list[str] | None,
        typer.Option(
            "--foils",
            help="Who made the foils: 'rules' (or 'rules:noun,swap'), a JSONL file, the folder of "
            "a run, or 'own': the run itself. Several times for several reports. Default: rules.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set; by default the one of the run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    captions: Annotated[
        int | None,
        typer.Option(min=1, help="Use so many captions, drawn at random."),
    ] = None,
    per_caption: Annotated[int, typer.Option(min=1, help="Foils of each caption.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the captions drawn and the foils.")] = 1,
    masks: Annotated[int, typer.Option(min=1, help="By a run: masked versions (K).")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="By a run: fillings of each (L).")] = 5,
    temperature: Annotated[
        float,
        typer.Option(callback=ABOVE_0, help="By a run: temperature of the fillings, above 0 (τ)."),
    ] = 1.5,
    masking: Annotated[
        Literal["scene-graph", "words"],
        typer.Option(help="By a run: mask whole units of the scene graph, or single words."),
    ] = "scene-graph",
    lm: Annotated[
        str | None,
        typer.Option(
            "--lm", help="Perplexity, too: folder of a language model, or 'own' for the run's head."
        ),
    ] = None,
    by_kind: Annotated[
        bool, typer.Option("--by-kind", help="Also by what is exchanged: colours, numbers …")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Judge a model on foils: does it prefer the true caption, and know the wrong words?

    [bold]Examples[/]

      counterfoil foil-report runs/scenes-rvse-mlp
      counterfoil foil-report runs/scenes-tags-dc --foils rules --foils own --lm own
      counterfoil foil-report runs/scenes-uniter-small --foils runs/scenes-tags --captions 500

    Any model is judged on foils of any source. Word discrimination and correction need the heads of
    TAGS-DC, the share of true negatives the drawn scenes.
    """
    check_inputs([run], data, format)
    from counterfoil.evaluation.foils.metrics import judge_foils
    from counterfoil.evaluation.foils.sets import FoilChoice, foils_by, is_rules
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import load_model

    bars = progress(quiet=as_json or markdown)
    unit: Literal["graph", "word"] = "graph" if masking == "scene-graph" else "word"
    choice = FoilChoice(per_caption, captions, seed, masks, samples, temperature, unit)
    options = parse_options(option or [])

    def read(folder: Path) -> Split:
        return evaluation_split(folder, data, format, options, cache, bars)[split]

    model, pairs = load_model(run, device), read(run)
    fluency = _fluency(lm, model, bars)
    reports = []
    for named in foils or ["rules"]:
        source = str(run) if named == OWN else named
        by_run = not is_rules(source) and Path(source).is_dir()
        theirs = read(Path(source)) if by_run else pairs
        if list(theirs.ids) != list(pairs.ids) or theirs.texts != pairs.texts:
            raise ConfigError(
                f"{source} and {run} have other images or captions in their split '{split}': name "
                "one data set for both with --data"
            )
        made = foils_by(source, theirs, choice, lambda path: load_model(path, device), bars)
        reports.append(
            judge_foils(model, pairs, made, fluency=fluency, by_kind=by_kind, progress=bars)
        )
    _show(reports, markdown, as_json)


def _fluency(lm: str | None, model: Model, bars: Progress) -> Fluency | None:
    if lm is None:
        return None
    from counterfoil.evaluation.foils.fluency import RunFluency, TransformersFluency

    return RunFluency(model, progress=bars) if lm == OWN else TransformersFluency(lm, model.device)


def _show(reports: list[FoilReport], markdown: bool, as_json: bool) -> None:
    if as_json:
        print_json([json.loads(report.to_json()) for report in reports])
        return
    for report in reports:
        if markdown:
            typer.echo(report.to_markdown())
        else:
            print_table(report.rows(), title=report.headline())
            for table in (report.kind_rows(), report.manner_rows()):
                if table:
                    print_table(table)
            console().print(report.notes(), highlight=False, markup=False)


def judge(
    run: Annotated[Path, typer.Argument(help="Run or model folder.")],
    judgements: Annotated[
        Path, typer.Argument(help="ExpertAnnotations.txt or CrowdFlowerAnnotations.txt.")
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set of the images; by default the one of the run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Correlate scores with human judgements of Flickr8k: Kendall's τ, as CLIPScore reports it.

    [bold]Examples[/]

      counterfoil judge runs/f8k ExpertAnnotations.txt
      counterfoil judge runs/f8k CrowdFlowerAnnotations.txt --data flickr8k/ --json

    Which kind of judgements a file has is seen from its numbers: three expert ratings (τ-c over all
    ratings; own captions left out) or the crowd's share of yes (τ-b).
    """
    check_inputs([run], data, format)
    from counterfoil.evaluation.judgements import judge as judge_model
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import load_model

    bars = progress(quiet=as_json)
    pairs = evaluation_split(run, data, format, parse_options(option or []), cache, bars)
    report = judge_model(load_model(run, device), pairs, judgements, bars)
    if as_json:
        print_json(report.as_dict())
        return
    print_table(report.rows())
    console().print(report.headline(), highlight=False, markup=False)
