"""`counterfoil correct`: which words of a sentence are wrong for an image, and the right ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import DataChoice, check_inputs, check_picture
from counterfoil.cli.output import print_json, print_line, print_table
from counterfoil.core.errors import ConfigError
from counterfoil.data.text.words import check_sentence

if TYPE_CHECKING:
    from counterfoil.models.correct import Change, Correction, SuspectWord
    from counterfoil.models.correction_rule import CorrectionRule
    from counterfoil.models.model import Model

Rule = tuple[float | None, float | None, int | None]
"""Threshold, margin and candidates as given; None: as chosen on dev."""


def correct(
    run: Annotated[
        Path,
        typer.Argument(
            callback=opt.find_models, help="Run or saved model, trained with tags-dc, or its name."
        ),
    ],
    image: Annotated[
        str | None, typer.Argument(help="Image file, or the id of an image in the data set.")
    ] = None,
    text: Annotated[str | None, typer.Argument(help="Sentence about the image, in quotes.")] = None,
    data: opt.Data = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split that has the image id (default: search all), or with --measure the split "
            "to measure on (default: test)."
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            callback=opt.SHARE,
            help="Correct only words at least this likely to be wrong, 0 to 1. Default: the value "
            "chosen on dev after training.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            callback=opt.FROM_0,
            help="Replace a word only if the score rises by more than this. Default: the value "
            "chosen on dev.",
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            help="Replacement words to try per position. Default: the value chosen on dev.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the precision of corrections on captions with words exchanged by rule. "
            "Takes no image and no sentence.",
        ),
    ] = False,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Choose threshold, margin and candidates on dev again, and save them in the run.",
        ),
    ] = False,
    max_captions: Annotated[
        int, typer.Option(min=1, help="Captions of each kind, true and exchanged (with --measure).")
    ] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Random seed (with --measure).")] = 1,
    out: opt.Picture = None,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Find the wrong words of a sentence about an image, and correct them.

    A word is replaced only by one of the same part of speech, and only if the score rises by more
    than a margin. Threshold and margin were chosen on the dev split after training. --measure
    prints how many changes are right, and how often no change is made.

    [bold]Examples[/]

      counterfoil correct runs/scenes-tags-dc photo.png \\
        "a man carrying a white helmet"
      counterfoil correct runs/scenes-tags-dc scene-test-000012 \\
        "two cows by a tree" -o right.png
      counterfoil correct runs/scenes-tags-dc --measure
    """
    source = DataChoice(data, format, option, cache, quiet=as_json)
    rule = (threshold, margin, candidates)
    if measure or choose:
        if image is not None or text is not None or out is not None:
            raise ConfigError("--measure and --choose take no image, no sentence and no --out")
        check_inputs([run], data, format)
        if choose and not measure and any(value is not None for value in rule):
            raise ConfigError(
                "--choose chooses these: leave out --threshold, --margin, --candidates"
            )
        model = _corrector(run, device, source, choose)
        if measure:
            _measure(run, model, source, split or "test", rule, max_captions, seed)
        elif as_json:
            print_json(_named(run, model) | {"rule": asdict(_rule_of(model))})
        return
    if image is None or text is None:
        raise ConfigError("expected an image and a sentence (or --measure to measure the model)")
    check_sentence(text, "correct")
    check_picture(out, image)
    check_inputs([run], data, format)
    _correct_one(run, image, text, source, split, rule, out, device)


def _correct_one(
    run: Path,
    image: str,
    text: str,
    source: DataChoice,
    split: str | None,
    rule: Rule,
    out: Path | None,
    device: str,
) -> None:
    from counterfoil.data.text.tokenizers import require_known, unknown_note
    from counterfoil.models.correct import correct as correct_caption
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    unknown = require_known(model.text, text).unknown_words
    fragments, pixels, _ = source.read_image(run, model, image, split)
    threshold, margin, candidates = rule
    result = correct_caption(
        model, fragments, text, threshold=threshold, margin=margin, candidates=candidates
    )
    if out is not None:
        from counterfoil.core.storage.atomic import write_atomically
        from counterfoil.plots.sentences import correct_png

        write_atomically(out, correct_png(result, pixels))
    if source.quiet:
        print_json({**_named(run, model), "image": image, **result.as_dict()})
        return
    _print(result)
    if unknown:
        print_line(unknown_note(unknown), style="yellow")
    if out is not None:
        print_line(f"picture: {out}")


def _named(run: Path, model: Model) -> dict[str, object]:
    return {"run": str(run), "model": model.spec.name}


def _rule_of(model: Model) -> CorrectionRule:
    from counterfoil.models.correct import rule_of

    return rule_of(model)


def _corrector(run: Path, device: str, source: DataChoice, choose: bool) -> Model:
    """The model of a run that can correct, with its rule chosen anew if asked."""
    from counterfoil.models.correct import correction_matcher
    from counterfoil.training.run import choose_run_rule
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    correction_matcher(model)
    if choose:
        model.correction_rule = choose_run_rule(run, model, source.cache, source.progress)
    return model


def _measure(
    run: Path,
    model: Model,
    source: DataChoice,
    split: str,
    rule: Rule,
    max_captions: int,
    seed: int,
) -> None:
    from counterfoil.evaluation.corrections import measure_corrections
    from counterfoil.models.correct import rule_of

    pairs = source.read(run, [split])
    report = measure_corrections(
        model,
        pairs[split],
        rule_of(model, *rule),
        captions=max_captions,
        seed=seed,
        progress=source.progress,
    )
    if source.quiet:
        print_json({**_named(run, model), **report.as_dict()})
        return
    print_table(report.rows())
    print_line(report.headline())


def _print(result: Correction) -> None:
    def row(word: SuspectWord) -> list[str]:
        wrong = f"{word.wrong:.3f}" if word.known else "unknown"
        return [word.word, wrong, ", ".join(word.suggestions)]

    print_table([["word", "wrong", "instead"], *(row(word) for word in result.words)])
    print_line(f"before  {result.score:.4f}  {result.text}")
    if result.changes:
        print_line(f"after   {result.corrected_score:.4f}  {result.corrected}", style="bold")
    else:
        print_line("nothing was changed")
    for change in result.refused:
        print_line(_refusal(change))
    print_line(_rule_note(result.rule), style="dim")


def _refusal(change: Change) -> str:
    return (
        f"'{change.word}' looks wrong, but the best candidate, '{change.instead}', does not raise "
        f"the score enough ({change.score:.4f}): left as it is"
    )


def _rule_note(rule: CorrectionRule) -> str:
    if not rule.usable:
        return f"nothing is suggested: {rule.obstacle()}; --margin M suggests changes anyway"
    if rule.precision is None:
        return "the precision of these changes was not measured; --measure does so"
    return f"on dev, {rule.precision:.0%} of {rule.made} changes by this rule were right"
