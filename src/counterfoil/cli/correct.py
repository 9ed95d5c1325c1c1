"""`counterfoil correct`: which words of a sentence are wrong for an image, and the right ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from counterfoil.cli.explain import ImageSource
from counterfoil.cli.output import (
    CACHE_OPTION,
    FROM_0,
    JSON_OPTION,
    SHARE,
    FormatOption,
    SourceOptions,
    check_inputs,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
)
from counterfoil.data.text.words import check_sentence

if TYPE_CHECKING:
    from counterfoil.models.correct import Change, Correction, SuspectWord
    from counterfoil.models.correction_rule import CorrectionRule


def correct(
    run: Annotated[Path, typer.Argument(help="Run or model folder, trained with tags-dc.")],
    image: Annotated[
        str | None,
        typer.Argument(help="An image file, or an image id of the data set."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Argument(help="The sentence."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set of the id; by default the one of the run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split of the id (default: all), or to measure on (default: test)."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            callback=SHARE,
            help="Leave words alone that are less likely wrong (0 to 1). Default: chosen on dev.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            callback=FROM_0,
            help="Replace a word only if its score gain is above this. Default: chosen on dev.",
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1, max=100, help="Words tried in place of one (1 to 100). Default: chosen on dev."
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure precision on captions with words exchanged by rule; no image, no text.",
        ),
    ] = False,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Choose threshold, margin and candidates on dev again, and keep them in the run.",
        ),
    ] = False,
    captions: Annotated[
        int, typer.Option(min=1, help="Captions to measure on, of each kind (with --measure).")
    ] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Random seed (with --measure).")] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also draw the correction, as a PNG file."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Find the wrong words of a sentence about an image, and correct them.

    [bold]Examples[/]

      counterfoil correct runs/scenes-tags-dc photo.png "a man carrying a white helmet"
      counterfoil correct runs/scenes-tags-dc scene-test-000012 "two cows by a tree" -o right.png
      counterfoil correct runs/scenes-tags-dc --measure

    A word is replaced only by one of the same part of speech, and only if the score rises by more
    than a margin. Margin and threshold were chosen on the run's dev split. --measure prints how
    many of the changes are right, and how often none is made.
    """
    from counterfoil.core.errors import ConfigError

    if measure or choose:
        if image is not None or text is not None or out is not None:
            raise ConfigError("--measure and --choose take no image, no sentence and no --out")
        check_inputs([run], data, format)
        read = Reading(run, data, format, option or [], split, cache)
        asked = (threshold, margin, candidates)
        if choose and not measure and any(value is not None for value in asked):
            raise ConfigError(
                "--choose chooses these: leave out --threshold, --margin, --candidates"
            )
        _measure(read, asked, choose, measure, captions, seed, device, as_json)
        return
    if image is None or text is None:
        raise ConfigError("expected an image and a sentence (or --measure to measure the model)")
    check_sentence(text, "correct")
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG, name it so")
    check_inputs([run], data, format)
    from counterfoil.data.text.tokenizers import require_known, unknown_note
    from counterfoil.models.correct import correct as correct_caption
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    unknown = require_known(model.text, text).unknown_words
    source = ImageSource(run, data, format, option or [], split, cache, quiet=as_json)
    fragments, pixels = source.read(model, image)
    result = correct_caption(
        model, fragments, text, threshold=threshold, margin=margin, candidates=candidates
    )
    if out is not None:
        from counterfoil.core.storage.atomic import write_atomically
        from counterfoil.plots.sentences import correct_png

        write_atomically(out, correct_png(result, pixels))
    if as_json:
        print_json({"run": str(run), "model": model.spec.name, "image": image, **result.as_dict()})
        return
    _print(result)
    if unknown:
        console().print(unknown_note(unknown), highlight=False, markup=False, style="yellow")
    if out is not None:
        console().print(f"picture: {out}", highlight=False, markup=False)


class Reading(NamedTuple):
    """Which captions to measure corrections on."""

    run: Path
    data: str | None
    format: str | None
    option: list[str]
    split: str | None
    cache: Path


def _measure(
    read: Reading,
    asked: tuple[float | None, float | None, int | None],
    choose: bool,
    measure: bool,
    captions: int,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    from counterfoil.evaluation.corrections import measure_corrections
    from counterfoil.models.correct import correcting, rule_of
    from counterfoil.training.run import choose_run_rule
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import load_model

    bars = progress(quiet=as_json)
    model = load_model(read.run, device)
    correcting(model)
    if choose:
        model.correction_rule = choose_run_rule(read.run, model, read.cache, bars)
    if not measure:
        if as_json:
            chosen = asdict(rule_of(model))
            print_json({"run": str(read.run), "model": model.spec.name, "rule": chosen})
        return
    pairs = evaluation_split(
        read.run, read.data, read.format, parse_options(read.option), read.cache, bars
    )
    rule = rule_of(model, *asked)
    report = measure_corrections(
        model, pairs[read.split or "test"], rule, captions=captions, seed=seed, progress=bars
    )
    if as_json:
        print_json({"run": str(read.run), "model": model.spec.name, **report.as_dict()})
        return
    print_table(report.rows())
    console().print(report.headline(), highlight=False, markup=False)


def _print(found: Correction) -> None:
    def row(word: SuspectWord) -> list[str]:
        wrong = f"{word.wrong:.3f}" if word.known else "unknown"
        return [word.word, wrong, ", ".join(word.suggestions)]

    print_table([["word", "wrong", "instead"], *(row(word) for word in found.words)])
    out = console()
    out.print(f"before  {found.score:.4f}  {found.text}", highlight=False, markup=False)
    if found.changes:
        line = f"after   {found.corrected_score:.4f}  {found.corrected}"
        out.print(line, highlight=False, markup=False, style="bold")
    else:
        out.print("nothing was changed", highlight=False)
    for change in found.refused:
        out.print(_refusal(change), highlight=False, markup=False)
    out.print(_rule_note(found.rule), highlight=False, markup=False, style="dim")


def _refusal(change: Change) -> str:
    return (
        f"'{change.word}' looks wrong, but the best candidate, '{change.instead}', does not raise "
        f"the score enough ({change.score:.4f}): left as it is"
    )


def _rule_note(rule: CorrectionRule) -> str:
    if not rule.usable:
        return f"nothing is suggested: {rule.obstacle()}; --margin M makes changes nevertheless"
    if rule.precision is None:
        return "how often such a change is right was not measured: --measure"
    return f"on dev, {rule.precision:.0%} of {rule.made} changes by this rule were right"
