"""The web service as an ASGI application, and the HTTP server that runs it."""

from __future__ import annotations

import gc
import math
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from counterfoil import __version__
from counterfoil.app.access import LOOPBACK, Access
from counterfoil.app.connections import Connections, Limits, proxy_networks
from counterfoil.app.content import Content
from counterfoil.app.guard import App, Guard
from counterfoil.app.problems import install
from counterfoil.app.protocol import GRACE_SECONDS, protocol_class
from counterfoil.app.routes import Service, router
from counterfoil.core.errors import ConfigError

STATIC = Path(__file__).parent / "static"

BACKLOG = 512
"""Connections that the operating system queues until they are accepted."""

ACCEPT_BATCH = 64

SWITCH_SECONDS = 0.001
"""Most seconds that a thread keeps the interpreter lock while others wait for it."""

OTHER_FILES = 128
"""Open files reserved for the index, pictures being read and uploads on disk."""


def create_app(
    content: Content, limits: Limits | None = None, access: Access | None = None
) -> Guard:
    """The application for an ASGI server; without ``access``, only this machine can use it."""
    service = Service(content, limits or Limits(), access or Access(LOOPBACK))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Counterfoil",
        version=__version__,
        description="Image-text matching: scores, search, explanations, corrections.",
        docs_url=None,  # FastAPI's own page loads scripts from other hosts
        redoc_url=None,
        lifespan=lifespan,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    app.include_router(router)
    _add_pages(app)
    install(app)
    return Guard(cast(App, app), service.limits, service.meters, service.access, service.turns)


def _add_pages(app: FastAPI) -> None:
    """`/` is the page, `/docs` the API's documentation."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(STATIC / "docs.html", headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> FileResponse:
        return FileResponse(STATIC / "icon.svg")

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


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

    ``proxies`` are addresses whose X-Forwarded-For and X-Forwarded-Proto headers are trusted.
    """
    server = make_server(content, host, limits or Limits(), access, tls, proxies)
    prepare(cast(Guard, server.config.app))
    with short_collections(), frequent_switches():
        listening = listen(host, port)
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        on_ready(f"{scheme}://{name}:{listening.getsockname()[1]}/")
        server.run(sockets=[listening])


def prepare(guard: Guard) -> None:
    """Do what the first requests would otherwise do on the thread of the event loop."""
    cast(FastAPI, guard.app).openapi()  # routes and schemas: FastAPI builds them on demand
    anyio.run(lambda: anyio.to_thread.run_sync(int))  # imports the backend of anyio


@contextmanager
def short_collections() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection.

    A full collection stops all threads while it visits every object. With libraries and models
    loaded, that takes longer than a health check may. Only objects made by requests need it.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()  # what is garbage now would stay for good
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let threads that compute pass on the interpreter lock more often than by default.

    The event loop gives up the lock with every read and write, and the thread of the models may
    keep it for a whole interval each time.
    """
    default = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(default)


def make_server(
    content: Content,
    host: str,
    limits: Limits,
    access: Access | None = None,
    tls: ssl.SSLContext | None = None,
    proxies: Collection[str] = (),
) -> uvicorn.Server:
    """A server for sockets of ``host``; ``access`` defaults to `Access.to` of the host."""
    limits = _within_open_files(limits)
    trusted = proxy_networks(proxies)
    connections = Connections(limits, trusted)
    app = create_app(content, limits, access or Access.to(host))
    app.meters.gauge("connections", "Connections.", lambda: len(connections))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=protocol_class(connections, limits, tls),
        ws="none",  # a WebSocket would escape the limits
        backlog=_accepted_at_once(limits),
        proxy_headers=bool(trusted),
        forwarded_allow_ips=[str(network) for network in trusted],
        timeout_keep_alive=math.ceil(limits.keep_alive + GRACE_SECONDS),
        timeout_graceful_shutdown=math.ceil(limits.timeout),
        h11_max_incomplete_event_size=32 * 1024,
        lifespan="on",
    )
    return Server(config)


class Server(uvicorn.Server):
    """A server whose backlog is longer than the number of connections accepted at once.

    asyncio uses one number for both.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses a free port."""
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
    """TLS with a certificate chain and its key in PEM files, or in one file with both."""
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
        raise ConfigError(_tls_error(certificate, key, error)) from None
    return context


def _no_password() -> str:
    raise ConfigError(
        "--tls-key: the key is encrypted, but the service cannot ask for a password; decrypt it "
        "with: openssl pkey -in KEY -out DECRYPTED"
    )


def _tls_error(certificate: Path, key: Path | None, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key {key or certificate} is not the key of --tls-cert {certificate}"
    files = f"--tls-cert {certificate}" + (f", --tls-key {key}" if key is not None else "")
    return (
        f"{files}: not a certificate and its private key in PEM files ({error.reason}); give "
        "both, or one file with both"
    )


def _within_open_files(limits: Limits) -> Limits:
    """Reduce the number of connections to what the limit on open files allows."""
    if sys.platform == "win32":  # has no limit on open files
        return limits
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits
    most = max(files - OTHER_FILES - ACCEPT_BATCH - limits.spare_connections, 16)
    return replace(limits, connections=min(limits.connections, most))


def _accepted_at_once(limits: Limits) -> int:
    """Connections accepted in one batch: few enough that none is closed before its first read."""
    fewest = min(limits.connections, limits.address_connections or limits.connections)
    return max(1, min(ACCEPT_BATCH, fewest // 2))
