"""`counterfoil evaluate`: retrieval metrics of a run, a saved model or an ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    console,
    parse_options,
    print_table,
    progress,
)


def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run or model folders; several are averaged as an ensemble."),
    ],
    data: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this annotation on Python 3.10
        typer.Option("--data", help="Data set; by default the one of the first run."),
    ] = None,
    format: Annotated[Optional[str], typer.Option(help="Its format, if not detected.")] = None,  # noqa: UP045
    option: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--option", help="Option of the data source: key=value."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    folds: Annotated[
        int, typer.Option(help="0: the whole split; 5: COCO's mean over five folds of 1K.")
    ] = 0,
    bootstrap: Annotated[int, typer.Option(help="Resamples for 95 % intervals; 0: none.")] = 1000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cxc: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--cxc", help="Crisscrossed Captions file: adds mAP@R and R-precision."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", help="Also write the report as JSON."),
    ] = None,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Evaluate retrieval both ways: R@1/5/10, RSUM, median and mean rank, MRR.

    [bold]Examples[/]

      counterfoil evaluate runs/rvse-mlp-scenes
      counterfoil evaluate runs/a runs/b --split testall --folds 5 --json
      counterfoil evaluate my-model --data photos/captions.jsonl

    Ties count against the model: scoring everything alike gives R@1 near zero, not 100.
    """
    from counterfoil.evaluation.evaluate import report_scores
    from counterfoil.evaluation.scoring import score_split
    from counterfoil.files import write_atomically
    from counterfoil.training.load import evaluation_split, load_model

    bars = progress(quiet=as_json or markdown)
    pairs = evaluation_split(runs[0], data, format, parse_options(option or []), cache, bars)
    found = [score_split(load_model(run, device), pairs[split], progress=bars) for run in runs]
    positives = None
    if cxc is not None:
        from counterfoil.evaluation.split_ids import cxc_positives

        positives = cxc_positives(cxc, pairs[split], found[0])
    report = report_scores(found, split, folds=folds, bootstrap=bootstrap, positives=positives)
    if out is not None:
        write_atomically(out, report.to_json())
    if as_json:
        typer.echo(report.to_json())
    elif markdown:
        typer.echo(report.to_markdown())
    else:
        print_table(report.rows(), title=report.headline())
        if report.extended is not None:
            print_table(report.extended.rows())
        console().print(f"{report.tie_rule}", highlight=False)
        if found[0].skipped:
            console().print(
                f"{len(found[0].skipped)} images skipped, the first: {found[0].skipped[0]}"
            )
