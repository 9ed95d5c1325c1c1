"""`counterfoil judge`: do a model's scores agree with people's judgements?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterfoil.cli.output import (
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
    from counterfoil.training.load import evaluation_split, load_model

    bars = progress(quiet=as_json)
    pairs = evaluation_split(run, data, format, parse_options(option or []), cache, bars)
    report = judge_model(load_model(run, device), pairs, judgements, bars)
    if as_json:
        print_json(report.as_dict())
        return
    print_table(report.rows())
    console().print(report.headline(), highlight=False, markup=False)
