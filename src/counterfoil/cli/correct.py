"""`counterfoil correct`: which words of a sentence are wrong for an image, and the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from counterfoil.cli.explain import ImageSource
from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    SHARE,
    FormatOption,
    SourceOptions,
    check_inputs,
    console,
    print_json,
    print_table,
)
from counterfoil.cli.sentences import check_sentence

if TYPE_CHECKING:
    from counterfoil.models.correct import Change, Correction, SuspectWord


def correct(
    run: Annotated[Path, typer.Argument(help="Run or model folder, trained with tags-dc.")],
    image: Annotated[str, typer.Argument(help="An image file, or an image id of the data set.")],
    text: Annotated[str, typer.Argument(help="The sentence.")],
    data: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this annotation on Python 3.10
        typer.Option("--data", help="Data set of the id; by default the one of the run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Split of the id; by default all are searched."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(callback=SHARE, help="Words less likely wrong (0 to 1) are left alone.")
    ] = 0.5,
    suggestions: Annotated[int, typer.Option(min=1, help="Words tried in place of one.")] = 5,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", help="Also draw the correction, as a PNG file."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Find the wrong words of a sentence about an image, and correct them.

    [bold]Examples[/]

      counterfoil correct runs/tags-dc-scenes photo.png "a man carrying a white helmet"
      counterfoil correct runs/tags-dc-scenes scene-test-000012 "two cows by a tree" -o right.png

    A word is exchanged only where the sentence then scores higher; what was thought of but would
    lower the score is named.
    """
    from counterfoil.errors import ConfigError

    check_sentence(text, "correct")
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG, name it so")
    check_inputs([run], data, format)
    from counterfoil.models.correct import correct as correct_caption
    from counterfoil.models.word_spans import require_known, unknown_note
    from counterfoil.training.load import load_model

    model = load_model(run, device)
    unknown = require_known(model.text, text).unknown_words
    source = ImageSource(run, data, format, option or [], split, cache, quiet=as_json)
    fragments, pixels = source.read(model, image)
    found = correct_caption(model, fragments, text, threshold=threshold, suggestions=suggestions)
    if out is not None:
        from counterfoil.evaluation.correct_chart import correct_png
        from counterfoil.files import write_atomically

        write_atomically(out, correct_png(found, pixels))
    if as_json:
        print_json({"run": str(run), "model": model.spec.name, "image": image, **found.as_dict()})
        return
    _print(found)
    if unknown:
        console().print(unknown_note(unknown), highlight=False, markup=False, style="yellow")
    if out is not None:
        console().print(f"picture: {out}", highlight=False, markup=False)


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


def _refusal(change: Change) -> str:
    return (
        f"'{change.word}' looks wrong, but the best word found instead, '{change.instead}', "
        f"does not raise the score ({change.score:.4f}): left as it is"
    )
