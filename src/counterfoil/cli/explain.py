"""`counterfoil explain`: which words of a sentence speak for an image, and which against."""

from __future__ import annotations

from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import DataChoice, check_inputs, check_picture
from counterfoil.cli.output import console, print_json, print_line, print_table
from counterfoil.core.printable import printable
from counterfoil.data.text.words import check_sentence

if TYPE_CHECKING:
    from rich.text import Text

    from counterfoil.models.match import Match, Method, WordEffect


class WordMethod(str, Enum):
    auto = "auto"
    parts = "parts"
    leave_one_out = "leave-one-out"
    mask = "mask"
    gradient = "gradient"
    combined = "combined"
    rollout = "rollout"
    discrimination = "discrimination"


METHOD_OF: dict[WordMethod, Method | None] = {
    WordMethod.auto: None,
    WordMethod.parts: "parts",
    WordMethod.leave_one_out: "leave-one-out",
    WordMethod.mask: "mask",
    WordMethod.gradient: "gradient",
    WordMethod.combined: "combined",
    WordMethod.rollout: "rollout",
    WordMethod.discrimination: "discrimination",
}


def explain(
    run: opt.Run,
    image: opt.Image,
    text: opt.Sentence,
    data: opt.Data = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: opt.IdSplit = None,
    method: Annotated[
        WordMethod,
        typer.Option(
            help="parts: a word's own part of the score. leave-one-out, mask: the fall of the "
            "score without the word, or with a mask in its place. gradient: gradient × input. "
            "combined: mean of leave-one-out and gradient. rollout, discrimination: UNITER's "
            "attention, TAGS-DC's head. auto: whichever has the right sign most often on dev."
        ),
    ] = WordMethod.auto,
    device: opt.Device = "auto",
    out: opt.Picture = None,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Explain the score of an image and a sentence, word by word.

    Green words raise the score, red words lower it. An effect is the word's own part of the score,
    how much the score drops without the word, or another measure; --method chooses. Words outside
    the model's vocabulary are dropped before scoring, and marked.

    [bold]Examples[/]

      counterfoil explain runs/scenes-naaf photo.png "a man on a red bicycle" \\
        --out why.png
      counterfoil explain runs/scenes-naaf scene-test-000012 \\
        "two cows next to a tree"
    """
    check_sentence(text, "explain")
    check_picture(out, image)
    check_inputs([run], data, format)
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    source = DataChoice(data, format, option, cache, quiet=as_json)
    fragments, pixels, _ = source.read_image(run, model, image, split)
    match = model.explain(fragments, text, METHOD_OF[method])
    if out is not None:
        from counterfoil.core.storage.atomic import write_atomically
        from counterfoil.plots.sentences import explain_png

        write_atomically(out, explain_png(match, pixels))
    if as_json:
        print_json({"run": str(run), "model": model.spec.name, "image": image, **match.as_dict()})
        return
    _print(match)
    if out is not None:
        print_line(f"picture: {out}")


def _print(match: Match) -> None:
    from counterfoil.data.text.tokenizers import unknown_note
    from counterfoil.plots.sentences import color_note, method_note, score_note, signed

    def row(word: WordEffect) -> list[str]:
        if not word.known:
            return [word.word, "not in vocabulary", "", ""]
        return [word.word, signed(word.effect), signed(word.positive), signed(word.negative)]

    out = console()
    out.print(colored(match, out.color_system in ("256", "truecolor")))
    print_table(
        [
            ["word", "effect", "positive", "negative"],
            *(row(word) for word in match.display_words()),
            *(row(word) for word in match.specials),
        ]
    )
    boundary = f", boundary {match.boundary:.4f}" if match.boundary is not None else ""
    print_line(f"score {match.score:.4f}{boundary}", style="bold")
    for line in filter(None, (score_note(match), method_note(match), color_note(match))):
        print_line(line)
    if match.unknown:
        print_line(unknown_note(match.unknown), style="yellow")


def colored(match: Match, many: bool = True) -> Text:
    """The sentence with each word in its color, on a terminal with ``many`` colors or a few.

    Control characters are escaped, so words begin where their escaped characters do.
    """
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    from counterfoil.models.match import shades
    from counterfoil.plots.sentences import color_of

    characters = [printable(character) for character in match.text]
    starts = [0, *accumulate(map(len, characters))]
    sentence = Text("".join(characters))
    for word, shade in zip(match.words, shades(match), strict=True):
        if word.span is not None and not word.known:
            sentence.stylize(Style(dim=True, underline=True), *(starts[end] for end in word.span))
            continue
        if word.span is None or abs(shade) <= 0.05:
            continue
        name, strong = ("green" if shade > 0 else "red"), abs(shade) > 0.5
        if many:
            ground = Color.from_rgb(*color_of(shade))
            style = Style(color="black", bgcolor=ground, bold=strong)
        else:
            style = Style(color="black", bgcolor=name, bold=True) if strong else Style(color=name)
        sentence.stylize(style, *(starts[end] for end in word.span))
    return sentence
