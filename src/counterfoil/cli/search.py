"""`counterfoil search`: images for a sentence, or captions for an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterfoil.cli.output import JSON_OPTION, check_index, console, print_json, print_table

if TYPE_CHECKING:
    from counterfoil.models.match import Match
    from counterfoil.search import Hit, Results


def search(
    index: Annotated[Path, typer.Argument(help="Folder of an index (counterfoil index).")],
    text: Annotated[
        str | None,
        typer.Argument(help="What to look for."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", "-i", help="An image file, or the id of an image in the index."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results.")] = 10,
    target: Annotated[
        Literal["images", "captions"] | None,
        typer.Option(help="What to find; by default images for a text, captions for an image."),
    ] = None,
    shortlist: Annotated[
        int | None,
        typer.Option(min=1, help="How many the matcher ranks; by default as the index was made."),
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Let the matcher score every item.")
    ] = False,
    explain: Annotated[
        int, typer.Option("--explain", min=0, help="Explain the first N results, word by word.")
    ] = 0,
    api_key: Annotated[
        str,
        typer.Option("--api-key", envvar="COUNTERFOIL_QDRANT_API_KEY", help="Of a Qdrant server."),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    as_json: bool = JSON_OPTION,
) -> None:
    """Search an index with a sentence or an image.

    [bold]Examples[/]

      counterfoil search index "a dog on a beach"
      counterfoil search index "two cows next to a tree" -k 3 --explain 1
      counterfoil search index --image photo.jpg

    The first stage's rank and score stand beside the matcher's: a result that came up from far
    below says that a longer --shortlist may find more. --exhaustive scores everything.
    """
    check_index(index)
    from counterfoil.search import SearchIndex

    secret = {"api_key": api_key} if api_key else None
    opened = SearchIndex.open(index, device=device, backend_options=secret)
    found = opened.search(
        text,
        image=image,
        k=k,
        target=target,
        shortlist=shortlist,
        exhaustive=exhaustive,
        explain=explain,
    )
    if as_json:
        print_json({"index": str(index), "model": opened.model.spec.name, **found.as_dict()})
    else:
        _print(found)


def _print(found: Results) -> None:
    out = console()
    rows = [_row(hit) for hit in found.hits]
    header = ["", "score", "first rank", "first score", found.target[:-1], "says"]
    print_table([header, *rows], words=(4, 5))
    for hit in found.hits:
        if hit.match is not None:
            _print_match(hit, hit.match)
    for note in found.notes:
        out.print(note, highlight=False, markup=False, style="yellow")
    spent = ", ".join(f"{name} {1000 * taken:.0f} ms" for name, taken in found.seconds.items())
    if found.exhaustive:
        how = f"all {found.items:,} {found.target} scored"
    else:
        how = f"{found.shortlist:,} of {found.items:,} {found.target} scored"
    out.print(f"{how}; {spent}", highlight=False, markup=False)


def _print_match(hit: Hit, match: Match) -> None:
    """The sentence in the colours of its words; their effects in numbers where there are none."""
    from counterfoil.cli.explain import coloured

    out = console()
    place = (hit.pixels or {}).get("file", "")
    title = f"{hit.rank}. {hit.id}  {place}".rstrip()
    out.print(title, highlight=False, markup=False, style="bold")
    if out.color_system is None:
        effects = ", ".join(
            f"{word.word} {word.effect:+.3f}" if word.known else f"{word.word} (unknown)"
            for word in match.words
        )
        out.print(f"   {effects}", highlight=False, markup=False)
    else:
        out.print(coloured(match, out.color_system in ("256", "truecolor")))
    worst = match.worst
    out.print(
        f"   least fitting word: {worst.word} ({worst.effect:+.3f})", highlight=False, markup=False
    )


def _row(hit: Hit) -> list[str]:
    says = hit.text if hit.text is not None else (hit.captions[0] if hit.captions else "")
    first = "–" if hit.first_score is None else f"{hit.first_score:.4f}"
    place = "–" if hit.first_rank is None else str(hit.first_rank)
    return [str(hit.rank), f"{hit.score:.4f}", place, first, hit.id, says]
