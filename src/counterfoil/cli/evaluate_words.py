"""`counterfoil evaluate-words`: which method finds the wrong word of a caption?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import DataChoice, check_inputs, check_out
from counterfoil.cli.output import print_json, print_line, print_table, say_fallback
from counterfoil.core.errors import ConfigError
from counterfoil.core.zoo import is_pretrained, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Pairs, Split
    from counterfoil.evaluation.caption_model import CaptionModel
    from counterfoil.evaluation.words.cases import Foils
    from counterfoil.evaluation.words.methods import MethodTable

TRUTH, FLUENT, RULES = "truth", "fluent", "rules"


def evaluate_words(
    runs: Annotated[
        list[Path],
        typer.Argument(callback=opt.find_models, help="Runs, model folders or pretrained models."),
    ],
    foils: Annotated[
        str,
        typer.Option(
            "--foils",
            help="How words are exchanged: 'rules', 'fluent' (drawn by a language model), 'truth' "
            "(drawn scenes), or a run that writes foils.",
        ),
    ] = RULES,
    data: opt.Data = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: Annotated[str, typer.Option(help="Split to report on.")] = "test",
    dev: Annotated[str, typer.Option(help="Split that chooses among the methods.")] = "dev",
    max_captions: Annotated[
        int, typer.Option(min=1, help="Captions to make false, at most, in the reported split.")
    ] = 500,
    dev_captions: Annotated[
        int,
        typer.Option(min=1, help="Captions of the dev split to make false, and as many true ones."),
    ] = 300,
    captions: Annotated[
        Path | None,
        typer.Option(
            help="Captions of the language model, one per line. Default: those of the training "
            "split; with fewer than 100, no language model and no replacement of words.",
        ),
    ] = None,
    replacement: Annotated[
        bool,
        typer.Option(
            help="Also measure words by replacement, which takes most of the time.",
        ),
    ] = True,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the captions sampled and of the foils.")
    ] = 0,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Resamples for 95 % confidence intervals; 0: none.")
    ] = 200,
    device: opt.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the table: Markdown for .md, else JSON."),
    ] = None,
    markdown: opt.Markdown = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Compare all methods that find the wrong word of a caption, for one or several models.

    A word of each caption is exchanged. Every method that a model has says which word it was:
    the matcher's own parts, leave-one-out, mask, gradient × input, attention rollout and TAGS-DC's
    head. The table adds what a language model finds without the image, the combination that an
    audit uses, and replacement: whether other words that the language model proposes fit better.
    Replacement scores about a hundred captions for each one; --no-replacement leaves it out.
    Methods are chosen on the dev split and reported on another.

    [bold]Examples[/]

      counterfoil evaluate-words scenes-naaf scenes-corrector --foils truth \\
        --data scenes --option images=[0,200,200]
      counterfoil evaluate-words photos-naaf photos-vse --data lite2-36 \\
        --foils fluent
    """
    check_inputs(runs, data, format)
    check_out(out)
    if split == dev:
        raise ConfigError(
            f"--split and --dev are both '{split}': methods chosen on a split look too good on it; "
            "name two"
        )
    from counterfoil.evaluation.words.methods import Reader, compare_methods
    from counterfoil.training.run_folder import load_model

    source = DataChoice(data, format, option, cache, quiet=as_json or markdown)
    bars = source.progress
    pairs = {run: source.read(run, [dev, split]) for run in runs}
    models = {run: load_model(run, device) for run in runs}
    say_fallback(bars, list(models.values()))
    first = pairs[runs[0]]
    for run in runs[1:]:
        for name in (dev, split):
            _check_same(run, pairs[run][name], first[name])
    language = _language(captions, first, foils)
    if language is None:
        bars.say(
            "note: too few training captions for a language model: no rows with surprise or "
            "replacement; --captions FILE names others"
        )
    make = _maker(foils, first, source, language, device, cache, bars)
    unique = len({run.name for run in runs}) == len(runs)
    table = compare_methods(
        {
            run.name if unique else str(run): Reader(
                models[run], pairs[run][dev], pairs[run][split]
            )
            for run in runs
        },
        make(dev, dev_captions, seed),
        make(split, max_captions, seed),
        foils,
        language=language,
        replacement=replacement,
        reference=dev_captions,
        bootstrap=bootstrap,
        seed=seed,
        progress=bars,
    )
    _show(table, out, markdown, as_json)


def _check_same(run: Path, split: Split, first: Split) -> None:
    if list(split.ids) != list(first.ids) or split.texts != first.texts:
        raise ConfigError(
            f"{run} and the first run have different images or captions in split "
            f"'{split.name}'; name one data set for all with --data"
        )


def _language(path: Path | None, pairs: Pairs, foils: str) -> CaptionModel | None:
    from counterfoil.evaluation.caption_model import MIN_CAPTIONS, CaptionModel

    if path is not None:
        return CaptionModel.read(path)
    if "train" in pairs and len(pairs.train.texts) >= MIN_CAPTIONS:
        return CaptionModel(pairs.train.texts)
    if foils == FLUENT:
        raise ConfigError(
            "--foils fluent needs captions for its language model: name them with --captions, or "
            f"use data with a training split of at least {MIN_CAPTIONS} captions"
        )
    return None


def _maker(
    foils: str,
    pairs: Pairs,
    source: DataChoice,
    language: CaptionModel | None,
    device: str,
    cache: Path,
    bars: Progress,
) -> Callable[[str, int, int], Foils]:
    """What makes the false captions of a split."""
    from counterfoil.evaluation.foils.sets import FoilChoice, foils_of_model
    from counterfoil.evaluation.words.cases import (
        fluent_cases,
        make_foils,
        rule_cases,
        written_cases,
    )
    from counterfoil.training.run_folder import load_model

    if foils == TRUTH:
        return lambda name, most, seed: make_foils(pairs[name], 1, most, seed)
    if foils == RULES:
        return lambda name, most, seed: rule_cases(pairs[name], most=most, seed=seed)
    if foils == FLUENT and language is not None:
        return lambda name, most, seed: fluent_cases(pairs[name], language, most=most, seed=seed)
    folder = resolve(foils, cache=cache) if is_pretrained(foils) else Path(foils)
    if not folder.is_dir():
        raise ConfigError(
            f"--foils '{foils}': expected {RULES}, {FLUENT}, {TRUTH}, or the folder or name of a "
            "run that writes foils"
        )
    extracted = [one.name for one in pairs if one.fragments is not None]
    writer, theirs = load_model(folder, device), source.read(folder, extracted)

    def written(name: str, most: int, seed: int) -> Foils:
        _check_same(folder, theirs[name], pairs[name])
        choice = FoilChoice(captions=most, seed=seed + 1)
        made = foils_of_model(writer, folder.name, theirs[name], choice, bars)
        return written_cases(pairs[name], made)

    return written


def _show(table: MethodTable, out: Path | None, markdown: bool, as_json: bool) -> None:
    if out is not None:
        text = table.to_markdown() if out.suffix == ".md" else table.to_json()
        from counterfoil.core.storage.atomic import write_atomically

        write_atomically(out, text)
    if as_json:
        print_json(table.as_dict())
    elif markdown:
        typer.echo(table.to_markdown())
    else:
        print_table(table.rows(), title=table.headline())
        print_line(table.notes())
