"""`counterfoil score`: how well sentences match images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import check_inputs
from counterfoil.cli.output import print_json, print_line, print_table

MOST_COLUMNS = 5
"""Images that have a column each; more would not fit beside the sentences."""


def score(
    run: opt.Run,
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="Sentence to score. Repeatable.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="UTF-8 file with one sentence per line; -: standard input."),
    ] = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Score every image with every sentence.

    Words outside the model's vocabulary are dropped before scoring, and listed.

    [bold]Examples[/]

      counterfoil score runs/demo photo.png -t "a man on a red bicycle" -t \\
        "two cows"
      counterfoil score runs/demo *.jpg --texts captions.txt --json
    """
    from counterfoil.core.errors import ConfigError, DataError

    given = [(f"sentence {number} of --text", one) for number, one in enumerate(text or (), 1)]
    given += _lines(texts) if texts else []
    sentences = [sentence for _, sentence in given]
    if not any(sentence.strip() for sentence in sentences):
        raise ConfigError("nothing to score: give a sentence with --text, or a file with --texts")
    check_inputs([run])
    from counterfoil.data.text.tokenizers import require_known, unknown_note
    from counterfoil.models.model import read_texts
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    if model.fragments_from is None:
        raise ConfigError(
            f"{run}: this model was trained on precomputed features, so it cannot read an image "
            "file; train on images, or evaluate on features with: counterfoil evaluate"
        )
    unknown = []
    for where, sentence in given:
        try:
            read_texts(model.text, sentence)  # also refuses one that has no words at all
            unknown.append(require_known(model.text, sentence).unknown_words)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    scores = model.score(images, sentences)
    if as_json:
        print_json(
            {
                "images": [str(image) for image in images],
                "texts": sentences,
                "unknown": unknown,
                "scores": [[round(float(x), 6) for x in row] for row in scores],
            }
        )
        return
    print_table(_table(images, sentences, [[f"{float(x):.4f}" for x in row] for row in scores]))
    for sentence, words in zip(sentences, unknown, strict=True):
        if words:
            print_line(f"{sentence}: {unknown_note(words)}", style="yellow")


def _table(images: list[Path], sentences: list[str], scores: list[list[str]]) -> list[list[str]]:
    """A row for each sentence or, with many images, for each image and sentence."""
    unique = len({image.name for image in images}) == len(images)
    names = [image.name if unique else str(image) for image in images]
    if len(images) <= MOST_COLUMNS:
        columns = zip(*scores, strict=True)
        rows = [[text, *column] for text, column in zip(sentences, columns, strict=True)]
        return [["sentence", *names], *rows]
    rows = [
        [name, text, one]
        for name, row in zip(names, scores, strict=True)
        for text, one in zip(sentences, row, strict=True)
    ]
    return [["image", "sentence", "score"], *rows]


def _lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a file that are not empty, each with its place."""
    from counterfoil.core.errors import DataError
    from counterfoil.core.storage.reading import read_text

    try:
        text = sys.stdin.buffer.read().decode() if str(path) == "-" else read_text(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from None
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), start=1)
    name = "standard input" if str(path) == "-" else path
    return [(f"{name}:{number}", line) for number, line in lines if line.strip()]
