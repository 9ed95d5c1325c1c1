"""`counterfoil evaluate`: retrieval and word metrics of a run, a saved model or an ensemble."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
)
from counterfoil.errors import ConfigError

if TYPE_CHECKING:
    from counterfoil.data.pairs import Split
    from counterfoil.evaluation.comparison import Comparison, RunResult
    from counterfoil.evaluation.report import RetrievalReport
    from counterfoil.evaluation.word_foils import Foils
    from counterfoil.evaluation.word_report import WordReport
    from counterfoil.models.model import Model
    from counterfoil.progress import Progress


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
    words: Annotated[
        bool, typer.Option("--words", help="Also: do word effects find the wrong words? (scenes)")
    ] = False,
    foils: Annotated[
        int, typer.Option(min=1, help="With --words: false captions made of each caption.")
    ] = 1,
    max_captions: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="With --words: use so many captions, drawn at random."),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Evaluate each run by itself; one table, a row a run.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out", "-o", help="Also write it: Markdown if the name ends in .md, else JSON."
        ),
    ] = None,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Evaluate retrieval both ways: R@1/5/10, RSUM, median and mean rank, MRR.

    [bold]Examples[/]

      counterfoil evaluate runs/rvse-mlp-scenes
      counterfoil evaluate runs/a runs/b --split testall --folds 5 --json
      counterfoil evaluate my-model --data photos/captions.jsonl
      counterfoil evaluate runs/a runs/b runs/c --words --each --markdown --out table.md

    Ties count against the model: scoring everything alike gives R@1 near zero, not 100. With
    --words, captions of drawn scenes are made false by one to three words, and the effects of the
    words are judged at finding them.
    """
    from counterfoil.training.load import evaluation_split

    bars = progress(quiet=as_json or markdown)
    settings = _Settings(split, folds, bootstrap, words, foils, max_captions, device, bars)

    def read(run: Path) -> Split:
        pairs = evaluation_split(run, data, format, parse_options(option or []), cache, bars)
        return pairs[split]

    if each:
        if cxc is not None:
            raise ConfigError("--cxc judges one model or ensemble: leave out --each")
        _show_comparison(_compare(runs, read, settings), out, markdown, as_json)
    else:
        _show(_together(runs, read(runs[0]), settings, cxc), out, markdown, as_json)


@dataclass(frozen=True)
class _Settings:
    """How to judge, whatever is judged."""

    split: str
    folds: int
    bootstrap: int
    words: bool
    foils: int
    max_captions: int | None
    device: str
    bars: Progress

    def make_foils(self, split: Split) -> Foils | None:
        from counterfoil.evaluation.word_foils import make_foils

        return make_foils(split, self.foils, self.max_captions) if self.words else None


@dataclass(frozen=True)
class _Found:
    """The reports of one model or ensemble, and the images it could not read."""

    retrieval: RetrievalReport
    words: WordReport | None
    skipped: list[str]


def _judge(
    models: list[Model], split: Split, made: Foils | None, settings: _Settings, cxc: Path | None
) -> _Found:
    from counterfoil.evaluation.evaluate import report_scores
    from counterfoil.evaluation.scoring import score_split
    from counterfoil.evaluation.word_effects import average_words, measure_words
    from counterfoil.evaluation.words import report_words

    scores = [score_split(model, split, progress=settings.bars) for model in models]
    positives = None
    if cxc is not None:
        from counterfoil.evaluation.split_ids import cxc_positives

        positives = cxc_positives(cxc, split, scores[0])
    report = report_scores(
        scores,
        settings.split,
        folds=settings.folds,
        bootstrap=settings.bootstrap,
        positives=positives,
    )
    words = None
    if made is not None:
        effects = [measure_words(model, split, made.cases, settings.bars) for model in models]
        words = report_words(
            average_words(effects), made, settings.split, bootstrap=settings.bootstrap
        )
    return _Found(report, words, scores[0].skipped)


def _together(runs: list[Path], split: Split, settings: _Settings, cxc: Path | None) -> _Found:
    """One model, or several as an ensemble."""
    from counterfoil.training.load import load_model

    made = settings.make_foils(split)
    models = [load_model(run, settings.device) for run in runs]
    if len({(model.fragments_from, str(model.fragments_options)) for model in models}) > 1:
        raise ConfigError("these runs read different features: evaluate them with --each")
    return _judge(models, split, made, settings, cxc)


def _compare(runs: list[Path], read: Callable[[Path], Split], settings: _Settings) -> Comparison:
    """Each run by itself, with features of its own kind, on the pairs of the first."""
    from counterfoil.evaluation.comparison import Comparison, RunResult
    from counterfoil.training.load import load_model

    first = read(runs[0])
    made = settings.make_foils(first)
    results: list[RunResult] = []
    for run in runs:
        split = read(run)
        if list(split.ids) != list(first.ids) or split.texts != first.texts:
            raise ConfigError(
                f"{run} and {runs[0]} have other images or captions in their split "
                f"'{settings.split}': name one data set for all with --data"
            )
        model = load_model(run, settings.device)
        found = _judge([model], split, made, settings, None)
        name = run.resolve().name
        results.append(
            RunResult(run=name, model=model.spec.name, retrieval=found.retrieval, words=found.words)
        )
    return Comparison(split=settings.split, runs=tuple(results))


def _show(found: _Found, out: Path | None, markdown: bool, as_json: bool) -> None:
    report, words = found.retrieval, found.words
    tree = json.loads(report.to_json())
    if words is not None:
        tree["words"] = json.loads(words.to_json())
    page = report.to_markdown() + (f"\n{words.to_markdown()}" if words is not None else "")
    if found.skipped:
        tree["skipped_images"] = found.skipped
        page += f"\n{len(found.skipped)} images could not be read and were left out.\n"
    _write(out, tree, page)
    if as_json:
        print_json(tree)
    elif markdown:
        typer.echo(page)
    else:
        print_table(report.rows(), title=report.headline())
        if report.extended is not None:
            print_table(report.extended.rows())
        console().print(f"{report.tie_rule}", highlight=False)
        if words is not None:
            print_table(words.rows(), title=words.headline())
            console().print(words.notes(), highlight=False, markup=False)
        if found.skipped:
            console().print(f"{len(found.skipped)} images skipped, the first: {found.skipped[0]}")


def _show_comparison(
    comparison: Comparison, out: Path | None, markdown: bool, as_json: bool
) -> None:
    tree = json.loads(comparison.to_json())
    _write(out, tree, comparison.to_markdown())
    if as_json:
        print_json(tree)
    elif markdown:
        typer.echo(comparison.to_markdown())
    else:
        print_table(comparison.rows(), title=comparison.headline())
        console().print(comparison.notes(), highlight=False, markup=False)


def _write(out: Path | None, tree: dict[str, Any], page: str) -> None:
    if out is None:
        return
    from counterfoil.files import write_atomically

    as_markdown = out.suffix.lower() == ".md"
    write_atomically(out, page if as_markdown else json.dumps(tree, ensure_ascii=False, indent=2))
