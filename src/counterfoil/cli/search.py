"""`counterfoil search`: images for a sentence, or captions for an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import open_index
from counterfoil.cli.output import console, print_json, print_line, print_table

if TYPE_CHECKING:
    from counterfoil.models.match import Match
    from counterfoil.search import Hit, Results


def search(
    index: opt.Index,
    text: Annotated[str | None, typer.Argument(help="Sentence to search with, in quotes.")] = None,
    image: Annotated[
        str | None,
        typer.Option(
            "--image",
            "-i",
            help="Search with an image instead: a file, or the id of an image in the index.",
        ),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results.")] = 10,
    target: Annotated[
        Literal["images", "captions"] | None,
        typer.Option(help="What to find. Default: images for a sentence, captions for an image."),
    ] = None,
    shortlist_size: opt.ShortlistSize = None,
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Score every item with the matcher: slow and exact."),
    ] = False,
    explain: Annotated[
        int,
        typer.Option("--explain", min=0, metavar="N", help="Explain the first N results per word."),
    ] = 0,
    api_key: opt.ApiKey = "",
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Search an index with a sentence or an image.

    The table shows each result's rank and score in the first stage beside the matcher's score. If
    a good result comes from far down the first stage, a larger --shortlist-size may find more.

    [bold]Examples[/]

      counterfoil search index "a dog on a beach"
      counterfoil search index "two cows next to a tree" -k 3 --explain 1
      counterfoil search index --image photo.jpg
    """
    opened = open_index(index, api_key, device)
    results = opened.search(
        text,
        image=image,
        k=k,
        target=target,
        shortlist_size=shortlist_size,
        exhaustive=exhaustive,
        explain=explain,
    )
    if as_json:
        print_json({"index": str(index), "model": opened.model.spec.name, **results.as_dict()})
    else:
        _print(results)


def _print(results: Results) -> None:
    rows = [_row(hit) for hit in results.hits]
    header = ["", "score", "first rank", "first score", results.target[:-1], "text"]
    print_table([header, *rows], words=(4, 5))
    for hit in results.hits:
        if hit.match is not None:
            _print_match(hit, hit.match)
    for note in results.notes:
        print_line(note, style="yellow")
    spent = ", ".join(f"{name} {1000 * taken:.0f} ms" for name, taken in results.seconds.items())
    scored = "all" if results.exhaustive else f"{results.shortlist:,} of"
    print_line(f"{scored} {results.items:,} {results.target} scored; {spent}")


def _print_match(hit: Hit, match: Match) -> None:
    """The sentence with its words colored or, without colors, with their effects as numbers."""
    from counterfoil.cli.explain import colored

    out = console()
    file = (hit.pixels or {}).get("file", "")
    print_line(f"{hit.rank}. {hit.id}  {file}".rstrip(), style="bold")
    if out.color_system is None:
        effects = ", ".join(
            f"{word.word} {word.effect:+.3f}" if word.known else f"{word.word} (unknown)"
            for word in match.words
        )
        print_line(f"   {effects}")
    else:
        out.print(colored(match, out.color_system in ("256", "truecolor")))
    worst = match.worst
    if worst.effect < 0:
        print_line(f"   least fitting word: {worst.word} ({worst.effect:+.3f})")


def _row(hit: Hit) -> list[str]:
    caption = hit.text if hit.text is not None else (hit.captions[0] if hit.captions else "")
    first = "–" if hit.first_score is None else f"{hit.first_score:.4f}"
    rank = "–" if hit.first_rank is None else str(hit.first_rank)
    return [str(hit.rank), f"{hit.score:.4f}", rank, first, hit.id, caption]
