"""`counterfoil score`: how well sentences match images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterfoil.cli.output import JSON_OPTION, check_inputs, console, print_json, print_table


def score(
    run: Annotated[Path, typer.Argument(help="Run or model folder.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    text: Annotated[
        list[str] | None,
        typer.Option("--text", "-t", help="A sentence; repeat it for several."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="A UTF-8 file with one sentence a line."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    as_json: bool = JSON_OPTION,
) -> None:
    """Score every image with every sentence.

    [bold]Example[/]

      counterfoil score runs/demo photo.png -t "a man on a red bicycle" -t "two cows"

    Words that the model does not know are left out, and named.
    """
    from counterfoil.core.errors import ConfigError

    sentences = [*(text or []), *(_lines(texts) if texts else [])]
    if not any(sentence.strip() for sentence in sentences):
        raise ConfigError("nothing to score: give a sentence with --text, or a file with --texts")
    check_inputs([run])
    from counterfoil.data.text.tokenizers import require_known, unknown_note
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    if model.fragments_from is None:
        raise ConfigError(
            f"{run}: this model was trained on precomputed features, so it cannot read an image "
            "file; train on images, or evaluate on features with: counterfoil evaluate"
        )
    unknown = [require_known(model.text, sentence).unknown_words for sentence in sentences]
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
    header = ["sentence", *(image.name for image in images)]
    rows = [
        [sentence, *(f"{float(x):.4f}" for x in column)]
        for sentence, column in zip(sentences, scores.T, strict=True)
    ]
    print_table([header, *rows])
    for sentence, words in zip(sentences, unknown, strict=True):
        if words:
            note = f"{sentence}: {unknown_note(words)}"
            console().print(note, highlight=False, markup=False, style="yellow")


def _lines(path: Path) -> list[str]:
    from counterfoil.core.errors import DataError
    from counterfoil.core.storage.reading import read_text

    try:
        return [line for line in read_text(path).splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from None
