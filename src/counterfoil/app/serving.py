"""Runs the service until it is told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from counterfoil.app.limits import Limits
from counterfoil.app.service import Content, create_app
from counterfoil.errors import ConfigError

BACKLOG = 256
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def serve(
    content: Content,
    host: str,
    port: int,
    limits: Limits | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Answer requests until a signal comes; what is under way is finished first."""
    listening = listen(host, port)
    server = make_server(content, host, limits or Limits())
    name = f"[{host}]" if ":" in host else host
    on_ready(f"http://{name}:{listening.getsockname()[1]}/")
    server.run(sockets=[listening])


def make_server(content: Content, host: str, limits: Limits) -> uvicorn.Server:
    """A server for sockets of ``host``.

    On this machine alone, it answers only to the names of this machine.
    """
    local = host in ("localhost", "127.0.0.1", "::1")
    config = uvicorn.Config(
        create_app(content, limits, LOOPBACK if local else None),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(limits.timeout),
        h11_max_incomplete_event_size=32 * 1024,
        lifespan="on",
    )
    return uvicorn.Server(config)


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
