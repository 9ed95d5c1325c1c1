"""`counterfoil serve`: the page, and the JSON API behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from counterfoil.cli.output import CACHE_OPTION, console, progress


def serve(
    place: Annotated[Path, typer.Argument(metavar="RUN|INDEX", help="Run, model or index folder.")],
    corrector: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this annotation on Python 3.10
        typer.Option("--corrector", help="A run trained with tags-dc, for suggestions."),
    ] = None,
    index: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--index", help="An index of this run; else its test split is shown."),
    ] = None,
    audit: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--audit", help="A folder that `counterfoil audit` wrote."),
    ] = None,
    runs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--runs", help="A folder of runs to show the curves of."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
) -> None:
    """Serve a page to search, explain and correct, with a JSON API.

    [bold]Examples[/]

      counterfoil serve runs/naaf-scenes --corrector runs/tags-dc-scenes
      counterfoil serve index --port 8080

    It listens on this machine alone, unless --host says otherwise: it has no users or passwords.
    Ctrl-C stops it. The API is described at /docs.
    """
    from counterfoil.app import require_web

    require_web()
    from counterfoil.app.load import open_content
    from counterfoil.app.serving import serve as run_server

    content = open_content(
        place,
        index=index,
        corrector=corrector,
        audit=audit,
        runs=runs,
        cache=cache,
        device=device,
        progress=progress(),
    )

    def ready(address: str) -> None:
        console().print(f"Counterfoil is at [bold]{address}[/] (Ctrl-C stops it)", highlight=False)

    run_server(content, host, port, on_ready=ready)
