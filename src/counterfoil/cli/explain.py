"""`counterfoil explain`: which words of a sentence speak for an image, and which against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
)
from counterfoil.data.text.words import check_sentence

if TYPE_CHECKING:
    from PIL import Image
    from rich.text import Text

    from counterfoil.data.fragments import Fragments
    from counterfoil.data.pairs import Pairs
    from counterfoil.models.match import Match, WordEffect
    from counterfoil.models.model import Model


def explain(
    run: Annotated[Path, typer.Argument(help="Run or model folder.")],
    image: Annotated[str, typer.Argument(help="An image file, or an image id of the data set.")],
    text: Annotated[str, typer.Argument(help="The sentence.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set of the id; by default the one of the run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split of the id; by default all are searched."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also draw the explanation, as a PNG file."),
    ] = None,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Explain the score of an image and a sentence word by word.

    [bold]Examples[/]

      counterfoil explain runs/scenes-naaf photo.png "a man on a red bicycle" --out why.png
      counterfoil explain runs/scenes-naaf scene-test-000012 "two cows next to a tree"

    Green words count for the match, red ones against it. With matchers that are a sum over words,
    effects add up to the score; with others, an effect is what the score loses when the word is
    left out. Words that the model does not know are left out before scoring, and marked.
    """
    from counterfoil.core.errors import ConfigError

    check_sentence(text, "explain")
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG, name it so")
    check_inputs([run], data, format)
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    source = ImageSource(run, data, format, option or [], split, cache, quiet=as_json)
    fragments, pixels = source.read(model, image)
    match = model.explain(fragments, text)
    if out is not None:
        from counterfoil.core.storage.atomic import write_atomically
        from counterfoil.plots.sentences import explain_png

        write_atomically(out, explain_png(match, pixels))
    if as_json:
        print_json({"run": str(run), "model": model.spec.name, "image": image, **match.as_dict()})
        return
    _print(match)
    if out is not None:
        console().print(f"picture: {out}", highlight=False, markup=False)


@dataclass(frozen=True)
class ImageSource:
    """Where the image of a command is: a file, or an id in some data or in that of the run."""

    run: Path
    data: str | None
    format: str | None
    option: list[str]
    split: str | None
    cache: Path
    quiet: bool

    def read(self, model: Model, image: str) -> tuple[Fragments, Image.Image | None]:
        """Fragments of the kind the model reads, and pixels where there are any."""
        fragments, pixels, _ = self.read_with_captions(model, image)
        return fragments, pixels

    def read_with_captions(
        self, model: Model, image: str
    ) -> tuple[Fragments, Image.Image | None, list[str]]:
        """The same, and the captions that the data set has of the image; a file has none."""
        from counterfoil.training.run_data import evaluation_split

        if Path(image).is_file():
            return (*_from_file(model, self.run, Path(image)), [])
        _refuse_missing_file(image, self.run, self.data)
        options, bars = parse_options(self.option), progress(quiet=self.quiet)
        pairs = evaluation_split(self.run, self.data, self.format, options, self.cache, bars)
        return _from_data(pairs, image, self.split)


def _from_file(model: Model, run: Path, path: Path) -> tuple[Fragments, Image.Image | None]:
    from counterfoil.core.errors import ConfigError

    if model.fragments_from is None:
        raise ConfigError(
            f"{run}: this model was trained on precomputed features, so it cannot read an image "
            "file; give the id of an image of its data set instead"
        )
    return model.reader.read(path)


def _refuse_missing_file(image: str, run: Path, data: str | None) -> None:
    """What looks like a file, or cannot be an id, is not searched for in a data set."""
    from counterfoil.core.errors import DataError
    from counterfoil.training.run_folder import run_config

    path = Path(image)
    if path.is_dir():
        raise DataError(f"{image}: a folder; give an image file, or the id of an image")
    if data is None and run_config(run) is None:
        raise DataError(
            f"{image}: no such image file; to use the id of an image, name its data with --data"
        )


def _from_data(
    pairs: Pairs, image: str, split: str | None
) -> tuple[Fragments, Image.Image | None, list[str]]:
    """Fragments, pixels where there are any, and captions of an image by its id."""
    from counterfoil.core.errors import DataError, nearest
    from counterfoil.data.images import open_image

    searched = [pairs[split]] if split is not None else list(pairs)
    for one in searched:
        if image in one.ids:
            index = list(one.ids).index(image)
            break
    else:
        names = ", ".join(one.name for one in searched)
        known = [name for one in searched for name in one.ids]
        example = f" (ids look like '{known[0]}')" if known else ""
        raise DataError(
            f"{image}: neither an image file nor an id in the data set '{pairs.name}', splits: "
            f"{names}{nearest(image, known)}{example}"
        )
    table = one.require_fragments()
    pixels = open_image(one.pixels[index]) if one.pixels is not None else None
    return table.read(index), pixels, list(one.captions[index])


def _print(match: Match) -> None:
    from counterfoil.data.text.tokenizers import unknown_note
    from counterfoil.plots.sentences import colour_note, method_note, signed, standing

    def row(word: WordEffect) -> list[str]:
        if not word.known:
            return [word.word, "unknown, left out", "", ""]
        return [word.word, signed(word.effect), signed(word.positive), signed(word.negative)]

    out = console()
    many = out.color_system in ("256", "truecolor")
    out.print(coloured(match, many))
    print_table(
        [
            ["word", "effect", "positive", "negative"],
            *(row(word) for word in match.words),
            *(row(word) for word in match.specials),
        ]
    )
    boundary = f", boundary {match.boundary:.4f}" if match.boundary is not None else ""
    out.print(f"score {match.score:.4f}{boundary}", highlight=False, style="bold")
    for line in filter(None, (standing(match), method_note(match), colour_note(match))):
        out.print(line, highlight=False, markup=False)
    if match.unknown:
        out.print(unknown_note(match.unknown), highlight=False, markup=False, style="yellow")


def coloured(match: Match, many: bool = True) -> Text:
    """The sentence with each word in its colour, on a terminal with ``many`` colours or a few."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    from counterfoil.models.match import shades
    from counterfoil.plots.sentences import colour_of

    sentence = Text(match.text)
    for word, shade in zip(match.words, shades(match), strict=True):
        if word.span is not None and not word.known:
            sentence.stylize(Style(dim=True, underline=True), *word.span)
            continue
        if word.span is None or abs(shade) <= 0.05:
            continue
        name, strong = ("green" if shade > 0 else "red"), abs(shade) > 0.5
        if many:
            ground = Color.from_rgb(*colour_of(shade))
            style = Style(color="black", bgcolor=ground, bold=strong)
        else:
            style = Style(color="black", bgcolor=name, bold=True) if strong else Style(color=name)
        sentence.stylize(style, *word.span)
    return sentence
