"""`counterfoil evaluate`: retrieval and word metrics of a run, a saved model or an ensemble."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    say_fallback,
)
from counterfoil.core.errors import ConfigError
from counterfoil.core.printable import printable

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Split
    from counterfoil.evaluation.comparison import Comparison, RunResult
    from counterfoil.evaluation.report import RetrievalReport
    from counterfoil.evaluation.retrieval import Identical
    from counterfoil.evaluation.two_stage import ShortlistReport
    from counterfoil.evaluation.words.cases import Foils
    from counterfoil.evaluation.words.report import WordReport
    from counterfoil.models.model import Model
    from counterfoil.scoring.encode import SplitScores


def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run or model folders; several are averaged as an ensemble."),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set; by default the one of the first run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    folds: Annotated[
        int, typer.Option(min=0, help="0: the whole split; 5: COCO's mean over five folds of 1K.")
    ] = 0,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Resamples for 95 % intervals; 0: none.")
    ] = 1000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise",
            help="Ensembles of unlike models: divide scores by their deviation before averaging.",
        ),
    ] = False,
    cxc: Annotated[
        Path | None,
        typer.Option("--cxc", help="Crisscrossed Captions file: adds mAP@R and R-precision."),
    ] = None,
    eccv: Annotated[
        bool,
        typer.Option("--eccv", help="ECCV Caption's positives: adds mAP@R and R-precision."),
    ] = False,
    words: Annotated[
        bool, typer.Option("--words", help="Also: do word effects find the wrong words? (scenes)")
    ] = False,
    foils: Annotated[
        int, typer.Option(min=1, help="With --words: false captions made of each caption.")
    ] = 1,
    max_captions: Annotated[
        int | None,
        typer.Option(min=1, help="With --words: use so many captions, drawn at random."),
    ] = None,
    shortlist: Annotated[
        Path | None,
        typer.Option("--shortlist", help="A fast run: only the best of its scores are looked at."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="With --shortlist: how many a query.")] = 50,
    identical_captions: Annotated[
        str | None,
        typer.Option(
            "--identical-captions",
            metavar="positives|negatives",
            help="Count captions that another image has word for word, too, as right or as wrong "
            "answers; by default both, if they are more than 1 %.",
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Evaluate each run by itself; one table, a row a run.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Also write it: Markdown if the name ends in .md, else JSON."
        ),
    ] = None,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Evaluate retrieval both ways: R@1/5/10, RSUM, median and mean rank, MRR.

    [bold]Examples[/]

      counterfoil evaluate runs/scenes-rvse-mlp
      counterfoil evaluate runs/a runs/b --split testall --folds 5 --json
      counterfoil evaluate my-model --data photos/captions.jsonl --identical-captions positives
      counterfoil evaluate runs/a runs/b runs/c --words --each --markdown --out table.md
      counterfoil evaluate runs/scenes-tags --shortlist runs/scenes-vse-infty --top 50

    Ties count against the model: scoring everything alike gives R@1 near zero, not 100. With
    --words, captions of drawn scenes are made false by one to three words, and the effects of the
    words are judged at finding them. A cross-encoder scores every pair by itself: with --shortlist
    it scores only what a fast model finds, and how often the answer is among that is printed.
    """
    if standardise and (each or words or shortlist is not None or len(runs) < 2):
        raise ConfigError(
            "--standardise is about the scores of several runs that are averaged over all pairs: "
            "name two or more, and leave out --each, --words and --shortlist"
        )
    extended = cxc is not None or eccv
    if cxc is not None and eccv:
        raise ConfigError("--cxc and --eccv are two lists of positives: give one of them")
    if shortlist is not None and (each or extended):
        raise ConfigError(
            "--shortlist judges one model or ensemble by its own pairs: leave out --each, --cxc "
            "and --eccv"
        )
    if each and extended:
        raise ConfigError("--cxc and --eccv judge one model or ensemble: leave out --each")
    check_inputs([*runs, *([shortlist] if shortlist else [])], data, format)
    from counterfoil.data.splits import leakage_warning
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import leakage_into

    bars = progress(quiet=as_json or markdown)
    settings = _Settings(
        split,
        folds,
        bootstrap,
        words,
        foils,
        max_captions,
        device,
        standardise,
        _treatment(identical_captions),
        cxc,
        eccv,
        bars,
    )

    def read(run: Path) -> Split:
        options = parse_options(option or [])
        pairs = evaluation_split(run, data, format, options, cache, bars)
        found = pairs[split]
        shared = leakage_into(run, data, options, pairs).get(found.name, 0)
        warning = leakage_warning({found.name: shared}) if shared else ""
        if warning:
            settings.warn(warning)
        return found

    if each:
        show_comparison(_compare(runs, read, settings), out, markdown, as_json)
    else:
        found = read(runs[0])
        first = _first_stage(shortlist, top, read, found, settings) if shortlist else None
        show(_together(runs, found, settings, first), out, markdown, as_json)


def _treatment(given: str | None) -> Identical:
    if given is None:
        return "both"
    if given == "positives":
        return "positives"
    if given == "negatives":
        return "negatives"
    raise ConfigError(f"--identical-captions: expected positives or negatives, got '{given}'")


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
    standardise: bool
    identical: Identical
    cxc: Path | None
    eccv: bool
    bars: Progress
    warned: set[str] = field(default_factory=set)

    def warn(self, text: str) -> None:
        """Say it once, however many runs are judged."""
        if text not in self.warned:
            self.warned.add(text)
            self.bars.say(text)

    def make_foils(self, split: Split) -> Foils | None:
        from counterfoil.evaluation.words.cases import make_foils

        return make_foils(split, self.foils, self.max_captions) if self.words else None


@dataclass(frozen=True)
class _FirstStage:
    """A fast run that finds ``top`` candidates for each query, and its scores of the split."""

    name: str
    top: int
    scores: SplitScores


def _first_stage(
    run: Path, top: int, read: Callable[[Path], Split], split: Split, settings: _Settings
) -> _FirstStage:
    from counterfoil.scoring.encode import score_split
    from counterfoil.training.run_folder import load_model

    own = read(run)
    _check_same(run, own, split, settings.split)
    scores = score_split(load_model(run, settings.device), own, progress=settings.bars)
    return _FirstStage(run.resolve().name, top, scores)


def _check_same(run: Path, split: Split, first: Split, name: str) -> None:
    if list(split.ids) != list(first.ids) or split.texts != first.texts:
        raise ConfigError(
            f"{run} has other images or captions in its split '{name}' than the first run: name "
            "one data set for all with --data"
        )


def _judge(
    models: list[Model],
    split: Split,
    made: Foils | None,
    settings: _Settings,
    first: _FirstStage | None = None,
) -> Found:
    from counterfoil.evaluation.words.effects import average_words, measure_words
    from counterfoil.evaluation.words.evaluate import report_words

    found = (
        _by_two_stages(models, split, settings, first)
        if first is not None
        else _by_all_pairs(models, split, settings)
    )
    if found.retrieval.warning():
        settings.warn(found.retrieval.warning())
    if made is None:
        return found
    effects = [measure_words(model, split, made.cases, settings.bars) for model in models]
    words = report_words(average_words(effects), made, settings.split, bootstrap=settings.bootstrap)
    return replace(found, words=words)


def _by_two_stages(
    models: list[Model], split: Split, settings: _Settings, first: _FirstStage
) -> Found:
    from counterfoil.evaluation.two_stage import score_two_stages

    found = score_two_stages(
        models,
        split,
        first.scores,
        name=first.name,
        top=first.top,
        folds=settings.folds,
        progress=settings.bars,
    )
    report = found.report(
        settings.split,
        folds=settings.folds,
        bootstrap=settings.bootstrap,
        identical_captions=settings.identical,
    )
    return Found(report, None, found.skipped, found.lists)


def _by_all_pairs(models: list[Model], split: Split, settings: _Settings) -> Found:
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
        standardise=settings.standardise,
        captions=scores[0].captions(split),
        identical_captions=settings.identical,
    )
    return Found(report, None, scores[0].skipped)


def _together(
    runs: list[Path],
    split: Split,
    settings: _Settings,
    first: _FirstStage | None = None,
) -> Found:
    """One model, or several as an ensemble."""
    from counterfoil.training.run_folder import load_model

    made = settings.make_foils(split)
    models = [load_model(run, settings.device) for run in runs]
    if len({(model.fragments_from, str(model.fragments_options)) for model in models}) > 1:
        raise ConfigError("these runs read different features: evaluate them with --each")
    say_fallback(settings.bars, models)
    return _judge(models, split, made, settings, first)


def _compare(runs: list[Path], read: Callable[[Path], Split], settings: _Settings) -> Comparison:
    """Each run by itself, with features of its own kind, on the pairs of the first."""
    from counterfoil.evaluation.comparison import Comparison, RunResult
    from counterfoil.training.run_folder import load_model

    first = read(runs[0])
    made = settings.make_foils(first)
    results: list[RunResult] = []
    told = False
    for run in runs:
        split = read(run)
        _check_same(run, split, first, settings.split)
        model = load_model(run, settings.device)
        told = told or say_fallback(settings.bars, [model])
        found = _judge([model], split, made, settings)
        name = run.resolve().name
        results.append(
            RunResult(run=name, model=model.spec.name, retrieval=found.retrieval, words=found.words)
        )
    return Comparison(split=settings.split, runs=tuple(results))


@dataclass(frozen=True)
class Found:
    """The reports of one model or ensemble, and the images it could not read."""

    retrieval: RetrievalReport
    words: WordReport | None
    skipped: list[str]
    lists: ShortlistReport | None = None


def show(found: Found, out: Path | None, markdown: bool, as_json: bool) -> None:
    report, words = found.retrieval, found.words
    tree = json.loads(report.to_json())
    if words is not None:
        tree["words"] = json.loads(words.to_json())
    page = report.to_markdown() + (f"\n{words.to_markdown()}" if words is not None else "")
    if found.lists is not None:
        tree["shortlist"] = found.lists.as_dict()
        page += f"\n{found.lists.to_markdown()}"
    if found.skipped:
        tree["skipped_images"] = found.skipped
        page += f"\n{len(found.skipped)} images could not be read and were left out.\n"
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
        if found.lists is not None:
            print_table(found.lists.rows())
            console().print(found.lists.note(), highlight=False)
        console().print(f"{report.tie_rule}", highlight=False)
        if words is not None:
            print_table(words.rows(), title=words.headline())
            console().print(words.notes(), highlight=False, markup=False)
        if found.skipped:
            line = f"{len(found.skipped)} images skipped, the first: {found.skipped[0]}"
            console().print(printable(line), markup=False)


def show_comparison(
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
    from counterfoil.core.storage.atomic import write_atomically

    as_markdown = out.suffix.lower() == ".md"
    write_atomically(out, page if as_markdown else json.dumps(tree, ensure_ascii=False, indent=2))
