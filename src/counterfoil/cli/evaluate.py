"""`counterfoil evaluate`: retrieval and word metrics of a run, a saved model or an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.evaluate_foils import show_forgetting
from counterfoil.cli.inputs import DataChoice, check_inputs, check_out
from counterfoil.cli.output import print_json, print_line, print_table, say_fallback, to_json
from counterfoil.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Split
    from counterfoil.evaluation.report import Comparison, RetrievalReport, RunResult, WordReport
    from counterfoil.evaluation.retrieval import Identical
    from counterfoil.evaluation.two_stage import ShortlistReport
    from counterfoil.evaluation.words.cases import Foils
    from counterfoil.models.model import Model
    from counterfoil.scoring.encode import SplitScores


NEEDS = {"foils_per_caption": "words", "max_captions": "words", "shortlist_size": "retriever"}
NEEDS |= {"start": "forgetting", "classes": "forgetting"}
EXCLUDES = {
    "forgetting": "words folds separately retriever standardize cxc eccv identical_captions",
    "standardize": "separately words retriever",
    "retriever": "separately cxc eccv",
    "separately": "cxc eccv",
    "cxc": "eccv",
}
"""Options without effect unless another is given, and options that have none beside another."""


def evaluate(
    context: typer.Context,
    runs: opt.Ensemble,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="Data set: a path or a name. Default: the data of the first run."
        ),
    ] = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    folds: Annotated[
        int,
        typer.Option(
            min=0, help="Average over this many folds; 5 is COCO's 1K protocol. 0: whole split."
        ),
    ] = 0,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Resamples for 95 % confidence intervals; 0: none.")
    ] = 1000,
    device: opt.Device = "auto",
    standardize: Annotated[
        bool,
        typer.Option(
            "--standardize",
            help="Standardize each model's scores before averaging them, for ensembles of models "
            "with different score ranges.",
        ),
    ] = False,
    cxc: Annotated[
        Path | None,
        typer.Option(
            "--cxc", help="Crisscrossed Captions file: adds its mAP@R and R-precision (COCO)."
        ),
    ] = None,
    eccv: Annotated[
        bool,
        typer.Option(
            "--eccv", help="Adds mAP@R and R-precision with the positives of ECCV Caption (COCO)."
        ),
    ] = False,
    words: Annotated[
        bool,
        typer.Option(
            "--words",
            help="Also evaluate how well word effects find the wrong words of foils (scenes only).",
        ),
    ] = False,
    foils_per_caption: Annotated[
        int, typer.Option(min=1, help="Foils per caption (with --words).")
    ] = 1,
    max_captions: Annotated[
        int | None,
        typer.Option(min=1, help="Sample this many captions (with --words). Default: all."),
    ] = None,
    retriever: Annotated[
        Path | None,
        typer.Option(
            "--retriever",
            callback=opt.find_models,
            metavar="RUN",
            help="Fast run that finds a shortlist per query; only its pairs are scored.",
        ),
    ] = None,
    shortlist_size: Annotated[
        int, typer.Option(min=1, help="Candidates per query (with --retriever).")
    ] = 50,
    identical_captions: Annotated[
        Literal["positives", "negatives"] | None,
        typer.Option(
            help="Whether a caption that another image has word for word counts as a right or a "
            "wrong answer. Default: report both if more than 1 % of captions are shared.",
        ),
    ] = None,
    forgetting: Annotated[
        bool,
        typer.Option(
            "--forgetting",
            help="Compare a fine-tuned run with the model it started from: foils, retrieval, "
            "classes.",
        ),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(callback=opt.find_models, help="Compare with this one, not model.init_from."),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option("--classes", help="File of class names (with --forgetting; see docs)."),
    ] = None,
    separately: Annotated[
        bool,
        typer.Option("--separately", help="Evaluate runs separately: one table, one row per run."),
    ] = False,
    markdown: opt.Markdown = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Also write the report: Markdown if the name ends in .md, else JSON "
            "(with --forgetting also a picture, .png).",
        ),
    ] = None,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Evaluate retrieval in both directions: R@1/5/10, RSUM, median and mean rank, MRR.

    Ties count against the model, so constant scores give an R@1 near 0. --words changes one to
    three words of each caption and measures how well word effects find them. A cross-encoder scores
    pairs one by one: with --retriever it scores only the candidates of a fast run, and the recall
    of these shortlists is reported.

    [bold]Examples[/]

      counterfoil evaluate runs/scenes-rvse-mlp
      counterfoil evaluate runs/a runs/b --split testall --folds 5 --json
      counterfoil evaluate my-model --data photos/captions.jsonl \\
        --identical-captions positives
      counterfoil evaluate runs/a runs/b runs/c --words --separately \\
        --markdown --out table.md
      counterfoil evaluate runs/scenes-negclip --forgetting --out tradeoff.png
      counterfoil evaluate runs/scenes-tags --retriever runs/scenes-vse-infty \\
        --shortlist-size 50
    """
    opt.check_together(context, NEEDS, EXCLUDES)
    if standardize and len(runs) < 2:
        raise ConfigError("--standardize is for ensembles: name two or more runs")
    check_inputs([*runs, retriever, start], data, format)
    check_out(out)
    if cxc is not None and not cxc.is_file():
        raise DataError(f"{cxc}: no such file")
    from counterfoil.data.splits import leakage_warning
    from counterfoil.training.run_data import skipped_notice
    from counterfoil.training.run_folder import leakage_into

    source = DataChoice(data, format, option, cache, quiet=as_json or markdown)
    settings = _Settings(
        split=split,
        folds=folds,
        bootstrap=bootstrap,
        words=words,
        foils_per_caption=foils_per_caption,
        max_captions=max_captions,
        device=device,
        standardize=standardize,
        identical=identical_captions or "both",
        cxc=cxc,
        eccv=eccv,
        bars=source.progress,
    )

    def read(run: Path) -> Split:
        pairs = source.read(run, [split])
        selected = pairs[split]
        if folds > len(selected):  # before hours of scoring
            raise ConfigError(
                f"--folds: expected at most {len(selected)} (the number of images), got {folds}"
            )
        shared = leakage_into(run, data, source.options, pairs).get(selected.name, 0)
        settings.warn(leakage_warning({selected.name: shared}) if shared else "")
        settings.warn(skipped_notice(pairs))
        return selected

    if forgetting:
        show_forgetting(
            runs, start, read, classes, bootstrap, device, cache, out, markdown, as_json
        )
    elif separately:
        show_comparison(_evaluate_separately(runs, read, settings), out, markdown, as_json)
    else:
        own = read(runs[0])
        first = _first_stage(retriever, shortlist_size, read, own, settings) if retriever else None
        show(_evaluate_ensemble(runs, own, settings, first), out, markdown, as_json)


@dataclass(frozen=True)
class _Settings:
    """How to evaluate, whatever is evaluated."""

    split: str
    folds: int
    bootstrap: int
    words: bool
    foils_per_caption: int
    max_captions: int | None
    device: str
    standardize: bool
    identical: Identical
    cxc: Path | None
    eccv: bool
    bars: Progress
    warned: set[str] = field(default_factory=set)

    def warn(self, text: str) -> None:
        """Warn once, however many runs are evaluated; nothing is said if the text is empty."""
        if text and text not in self.warned:
            self.warned.add(text)
            self.bars.say(text)

    def make_foils(self, split: Split) -> Foils | None:
        from counterfoil.evaluation.words.cases import make_foils

        return make_foils(split, self.foils_per_caption, self.max_captions) if self.words else None


@dataclass(frozen=True)
class _FirstStage:
    """A fast run that finds ``size`` candidates per query, and its scores of the split."""

    name: str
    size: int
    scores: SplitScores


def _first_stage(
    run: Path, size: int, read: Callable[[Path], Split], split: Split, settings: _Settings
) -> _FirstStage:
    from counterfoil.scoring.encode import score_split
    from counterfoil.training.run_folder import load_model

    own = read(run)
    _check_same(run, own, split, settings.split)
    scores = score_split(load_model(run, settings.device), own, progress=settings.bars)
    return _FirstStage(run.resolve().name, size, scores)


def _check_same(run: Path, split: Split, first: Split, name: str) -> None:
    if list(split.ids) != list(first.ids) or split.texts != first.texts:
        raise ConfigError(
            f"{run} and the first run have different images or captions in split '{name}'; name "
            "one data set for all with --data"
        )


def _evaluate(
    models: list[Model],
    split: Split,
    made: Foils | None,
    settings: _Settings,
    first: _FirstStage | None = None,
) -> Evaluation:
    from counterfoil.evaluation.words.effects import average_words, measure_words
    from counterfoil.evaluation.words.evaluate import report_words

    result = (
        _by_two_stages(models, split, settings, first)
        if first is not None
        else _by_all_pairs(models, split, settings)
    )
    if result.retrieval.warning():
        settings.warn(result.retrieval.warning())
    if made is None:
        return result
    effects = [measure_words(model, split, made.cases, settings.bars) for model in models]
    words = report_words(average_words(effects), made, settings.split, bootstrap=settings.bootstrap)
    return replace(result, words=words)


def _by_two_stages(
    models: list[Model], split: Split, settings: _Settings, first: _FirstStage
) -> Evaluation:
    from counterfoil.evaluation.two_stage import score_two_stages

    scores = score_two_stages(
        models,
        split,
        first.scores,
        name=first.name,
        shortlist_size=first.size,
        folds=settings.folds,
        progress=settings.bars,
    )
    report = scores.report(
        settings.split,
        folds=settings.folds,
        bootstrap=settings.bootstrap,
        identical_captions=settings.identical,
    )
    return Evaluation(report, None, scores.skipped, scores.lists)


def _by_all_pairs(models: list[Model], split: Split, settings: _Settings) -> Evaluation:
    from counterfoil.evaluation.annotations import extended_positives
    from counterfoil.evaluation.evaluate import report_scores
    from counterfoil.scoring.encode import score_split

    scores = [score_split(model, split, progress=settings.bars) for model in models]
    positives = extended_positives(split, scores[0], cxc=settings.cxc, eccv=settings.eccv)
    report = report_scores(
        scores,
        settings.split,
        folds=settings.folds,
        bootstrap=settings.bootstrap,
        positives=positives,
        standardize=settings.standardize,
        captions=scores[0].captions(split),
        identical_captions=settings.identical,
    )
    return Evaluation(report, None, scores[0].skipped)


def _evaluate_ensemble(
    runs: list[Path], split: Split, settings: _Settings, first: _FirstStage | None = None
) -> Evaluation:
    """One model, or several as an ensemble."""
    from counterfoil.models.model import reads_the_same
    from counterfoil.training.run_folder import load_model

    made = settings.make_foils(split)
    models = [load_model(run, settings.device) for run in runs]
    if not all(reads_the_same(models[0], model) for model in models):
        raise ConfigError("these runs read different features: evaluate them with --separately")
    say_fallback(settings.bars, models)
    return _evaluate(models, split, made, settings, first)


def _evaluate_separately(
    runs: list[Path], read: Callable[[Path], Split], settings: _Settings
) -> Comparison:
    """Each run separately, with features of its own kind, on the pairs of the first."""
    from counterfoil.evaluation.report import Comparison, RunResult
    from counterfoil.training.run_folder import load_model

    first = read(runs[0])
    made = settings.make_foils(first)
    results: list[RunResult] = []
    reported = False
    for run in runs:
        split = read(run)
        _check_same(run, split, first, settings.split)
        model = load_model(run, settings.device)
        reported = reported or say_fallback(settings.bars, [model])
        result = _evaluate([model], split, made, settings)
        name, kind = run.resolve().name, model.spec.name
        results.append(
            RunResult(run=name, model=kind, retrieval=result.retrieval, words=result.words)
        )
    return Comparison(split=settings.split, runs=tuple(results))


@dataclass(frozen=True)
class Evaluation:
    """The reports of one model or ensemble, and the images it could not read."""

    retrieval: RetrievalReport
    words: WordReport | None
    skipped: list[str]
    lists: ShortlistReport | None = None


def show(result: Evaluation, out: Path | None, markdown: bool, as_json: bool) -> None:
    report, words = result.retrieval, result.words
    tree = report.as_dict()
    if words is not None:
        tree["words"] = words.as_dict()
    page = report.to_markdown() + (f"\n{words.to_markdown()}" if words is not None else "")
    if result.lists is not None:
        tree["shortlist"] = result.lists.as_dict()
        page += f"\n{result.lists.to_markdown()}"
    if result.skipped:
        tree["skipped_images"] = result.skipped
        page += f"\n{len(result.skipped)} images could not be read and were left out.\n"
    _write(out, tree, page)
    if as_json:
        print_json(tree)
    elif markdown:
        typer.echo(page)
    else:
        for title, rows in report.tables():
            print_table(rows, title=title)
        if report.extended is not None:
            print_table(report.extended.rows())
        if result.lists is not None:
            print_table(result.lists.rows())
            print_line(result.lists.note())
        print_line(report.tie_rule)
        if words is not None:
            print_table(words.rows(), title=words.headline())
            print_line(words.notes())
        if result.skipped:
            print_line(f"{len(result.skipped)} images skipped, the first: {result.skipped[0]}")


def show_comparison(
    comparison: Comparison, out: Path | None, markdown: bool, as_json: bool
) -> None:
    tree = comparison.as_dict()
    _write(out, tree, comparison.to_markdown())
    if as_json:
        print_json(tree)
    elif markdown:
        typer.echo(comparison.to_markdown())
    else:
        print_table(comparison.rows(), title=comparison.headline())
        print_line(comparison.notes())


def _write(out: Path | None, tree: dict[str, Any], page: str) -> None:
    if out is None:
        return
    from counterfoil.core.storage.atomic import write_atomically

    as_markdown = out.suffix.lower() == ".md"
    write_atomically(out, page if as_markdown else to_json(tree))
