"""`counterfoil serve`: the page, and the JSON API behind it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import counterfoil.cli.options as opt
from counterfoil.app.connections import Limits
from counterfoil.cli.output import console, progress
from counterfoil.core.errors import ConfigError

if TYPE_CHECKING:
    import ssl


ACCESS, LIMITS = "Access", "Limits for slow or many clients"


def serve(
    place: Annotated[
        Path, typer.Argument(metavar="RUN|INDEX", help="Run, saved model or index folder.")
    ],
    corrector: opt.Corrector = None,
    index: Annotated[
        Path | None,
        typer.Option("--index", help="Index of RUN to search. Default: the run's test split."),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option("--audit", help="Audit to show: a folder written by `counterfoil audit`."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", help="Folder of runs whose training curves to show."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the token that requests must carry.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="COUNTERFOIL_TOKEN",
            help="Token that requests must carry. Other users of this machine can see it on a "
            "command line: prefer the variable or --token-file.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="Further host name or address that requests may use. Repeatable.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", help="Certificate chain for HTTPS (PEM).", rich_help_panel=ACCESS
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key", help="Private key of the certificate (PEM).", rich_help_panel=ACCESS
        ),
    ] = None,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-proxy",
            help="Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto "
            "headers are trusted. Repeatable.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    connections: Annotated[
        int, typer.Option(min=1, help="Open connections in total.", rich_help_panel=LIMITS)
    ] = Limits.connections,
    address_connections: Annotated[
        int,
        typer.Option(
            min=0, help="Open connections per client address; 0: no limit.", rich_help_panel=LIMITS
        ),
    ] = Limits.address_connections,
    header_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds to receive the headers of a request.", rich_help_panel=LIMITS
        ),
    ] = Limits.header_timeout,
    body_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds to receive the body of a request.", rich_help_panel=LIMITS
        ),
    ] = Limits.body_timeout,
    keep_alive: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that an idle connection stays open between requests.",
            rich_help_panel=LIMITS,
        ),
    ] = Limits.keep_alive,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
) -> None:
    """Serve a web page to search, explain and correct, with a JSON API (described at /docs).

    By default only this machine can connect. With another --host, requests must carry a token; one
    is generated and printed unless you give one. Ctrl-C stops the server.

    [bold]Examples[/]

      counterfoil serve runs/scenes-naaf --corrector runs/scenes-tags-dc
      counterfoil serve index --port 8080
      counterfoil serve index --host 0.0.0.0 --tls-cert cert.pem \\
        --tls-key key.pem
    """
    from counterfoil.app import require_web

    require_web()
    from counterfoil.app.access import Access, is_loopback
    from counterfoil.app.application import serve as run_server
    from counterfoil.app.content import open_content

    given = _given_token(token, token_file)
    made = secrets.token_urlsafe(24) if given is None and not is_loopback(host) else None
    access = Access.to(host, allow_host or (), given if made is None else made)
    tls = _tls(tls_cert, tls_key)
    limits = Limits(
        connections=connections,
        address_connections=address_connections,
        header_timeout=header_timeout,
        body_timeout=body_timeout,
        keep_alive=keep_alive,
    )
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
        print_address(address if made is None else f"{address}#token={made}")
        if made is not None and tls is None:
            console(stderr=True).print(
                "The token is sent unencrypted: use --tls-cert, or a proxy that terminates TLS."
            )

    run_server(
        content, host, port, limits, ready, access=access, tls=tls, proxies=trust_proxy or ()
    )


def print_address(address: str) -> None:
    # rich reads an IPv6 address in brackets as markup, and would wrap a long link
    console().print(
        f"Counterfoil is at [bold]{escape(address)}[/] (stop it with Ctrl-C)",
        highlight=False,
        soft_wrap=True,
    )


def _given_token(token: str | None, file: Path | None) -> str | None:
    if file is None:
        return token or None
    if token:
        raise ConfigError(
            "two tokens given: use either --token-file, or --token / COUNTERFOIL_TOKEN"
        )
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: cannot be read ({error})") from None


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    from counterfoil.app.application import tls_context

    if certificate is None:
        if key is not None:
            raise ConfigError(f"--tls-key {key} without --tls-cert; give the certificate as well")
        return None
    return tls_context(certificate, key)
