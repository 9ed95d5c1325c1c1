"""`counterfoil serve`: the page, and the JSON API behind it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

import counterfoil.cli.options as opt
from counterfoil.app.connections import Limits
from counterfoil.cli.output import console, progress
from counterfoil.core.errors import ConfigError

if TYPE_CHECKING:
    import ssl


def _access(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Access", **more)


def _limit(least: float, help: str) -> Any:
    return typer.Option(min=least, help=help, rich_help_panel="Limits for slow or many clients")


def serve(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|INDEX",
            callback=opt.find_models,
            help="Run, saved model or index folder, or a pretrained model.",
        ),
    ],
    corrector: opt.Corrector = None,
    index: Annotated[
        Path | None, typer.Option(help="Index of RUN to search. Default: the run's test split.")
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Audit to show: a folder written by `counterfoil audit`.")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of runs whose training curves to show.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8000,
    token_file: Annotated[
        Path | None, _access("--token-file", "File with the token that requests must carry.")
    ] = None,
    token: Annotated[
        str | None,
        _access(
            "--token",
            "Token that requests must carry. Other users of this machine can see it on a command "
            "line: prefer the variable or --token-file.",
            envvar="COUNTERFOIL_TOKEN",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        _access("--allow-host", "Further host name or address requests may use. Repeatable."),
    ] = None,
    tls_cert: Annotated[
        Path | None, _access("--tls-cert", "Certificate chain for HTTPS (PEM).")
    ] = None,
    tls_key: Annotated[
        Path | None, _access("--tls-key", "Private key of the certificate (PEM).")
    ] = None,
    trust_proxy: Annotated[
        list[str] | None,
        _access(
            "--trust-proxy",
            "Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto headers are "
            "trusted. Repeatable.",
        ),
    ] = None,
    connections: Annotated[int, _limit(1, "Open connections in total.")] = Limits.connections,
    address_connections: Annotated[
        int, _limit(0, "Open connections per client address; 0: no limit.")
    ] = Limits.address_connections,
    header_timeout: Annotated[
        float, _limit(0.1, "Seconds to receive the headers of a request.")
    ] = Limits.header_timeout,
    body_timeout: Annotated[
        float, _limit(0.1, "Seconds to receive the body of a request.")
    ] = Limits.body_timeout,
    keep_alive: Annotated[
        float, _limit(0.1, "Seconds that an idle connection stays open between requests.")
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
        folder,
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
        f"Counterfoil is at [bold]{escape(address)}[/] (Ctrl-C stops it)",
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
