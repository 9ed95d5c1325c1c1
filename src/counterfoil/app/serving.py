"""Runs the service until it is told to stop."""

from __future__ import annotations

import math
import socket
import ssl
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import uvicorn

from counterfoil.app.access import Access
from counterfoil.app.connections import Connections, proxy_networks
from counterfoil.app.limits import Limits
from counterfoil.app.protocol import GRACE, protocol_class
from counterfoil.app.service import Content, create_app
from counterfoil.errors import ConfigError

BACKLOG = 512
"""Connections that the system holds until they are accepted."""

ACCEPTED_AT_ONCE = 64

OTHER_FILES = 128
"""Open files besides connections: the index, pictures being read, uploads on disk."""


def serve(
    content: Content,
    host: str,
    port: int,
    limits: Limits | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
    *,
    access: Access | None = None,
    tls: ssl.SSLContext | None = None,
    proxies: Collection[str] = (),
) -> None:
    """Answer requests until SIGINT or SIGTERM; running requests are finished first.

    ``proxies`` are addresses whose X-Forwarded-For and X-Forwarded-Proto are believed.
    """
    server = make_server(content, host, limits or Limits(), access, tls, proxies)
    listening = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    scheme = "http" if tls is None else "https"
    on_ready(f"{scheme}://{name}:{listening.getsockname()[1]}/")
    server.run(sockets=[listening])


def make_server(
    content: Content,
    host: str,
    limits: Limits,
    access: Access | None = None,
    tls: ssl.SSLContext | None = None,
    proxies: Collection[str] = (),
) -> uvicorn.Server:
    """A server for sockets of ``host``; ``access`` is what `Access.to` says for it."""
    limits = _within_open_files(limits)
    trusted = proxy_networks(proxies)
    connections = Connections(limits, trusted)
    app = create_app(content, limits, access or Access.to(host))
    app.meters.gauges["counterfoil_connections"] = ("Connections.", lambda: len(connections))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=protocol_class(connections, limits, tls),
        ws="none",  # there are none; a connection that became one would be out of the limits
        backlog=_accepted_at_once(limits),
        proxy_headers=bool(trusted),
        forwarded_allow_ips=[str(network) for network in trusted],
        timeout_keep_alive=math.ceil(limits.keep_alive + GRACE),
        timeout_graceful_shutdown=math.ceil(limits.timeout),
        h11_max_incomplete_event_size=32 * 1024,
        lifespan="on",
    )
    return Server(config)


class Server(uvicorn.Server):
    """Accepts a few connections at once, but has the system hold more: for asyncio it is one."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


def listen(host: str, port: int) -> socket.socket:
    """A socket that connections can be made to already; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); try another --port") from None
    return listening


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """TLS with a certificate chain and its key, PEM files; the key may be in the same file."""
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if path is None:
            continue
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{option} {path}: cannot be read ({error.strerror})") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(_tls_mistake(certificate, key, error)) from None
    return context


def _no_password() -> str:
    raise ConfigError(
        "--tls-key: the key is encrypted, and a service cannot be asked for its password; decrypt "
        "it with: openssl pkey -in KEY -out DECRYPTED"
    )


def _tls_mistake(certificate: Path, key: Path | None, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key {key or certificate} is not the key of --tls-cert {certificate}"
    files = f"--tls-cert {certificate}" + (f", --tls-key {key}" if key is not None else "")
    return (
        f"{files}: not a certificate and its private key in PEM files ({error.reason}); give "
        "both, or one file with both"
    )


def _within_open_files(limits: Limits) -> Limits:
    """Fewer connections where the system allows few open files: beyond that, none is accepted."""
    if sys.platform == "win32":  # has no such limit
        return limits
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits
    most = max(files - OTHER_FILES - ACCEPTED_AT_ONCE - limits.spare_connections, 16)
    return replace(limits, connections=min(limits.connections, most))


def _accepted_at_once(limits: Limits) -> int:
    """Fewer than may be open: a new connection must not give way before it was read once."""
    fewest = min(limits.connections, limits.address_connections or limits.connections)
    return max(1, min(ACCEPTED_AT_ONCE, fewest // 2))
