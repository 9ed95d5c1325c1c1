"""Limits on clients: sizes of requests, numbers of connections, time-outs of request bodies.

When a limit on connections is reached, a new connection replaces the one for which the service has
waited longest: for a request, for the rest of a body, or for its response to be read. A connection
whose request is in progress is never closed. If none can be closed, the new connection is a spare
one, which only answers health checks. So idle and slow clients cannot lock others out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from counterfoil.app.problems import Problem
from counterfoil.core.errors import ConfigError

TEXT_LETTERS = 600
"""Most characters of a sentence; encoding time grows with its length."""

TEXT_WORDS = 120
TEXTS = 64
"""Most sentences, and most images, of one scoring request."""

RESULTS = 100
PAGE = 100
"""Most images or findings per page."""

ID_LETTERS = 1000

IPV6_CLIENT = 64
"""Bits of an IPv6 address that identify a client; the client chooses the rest."""

IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as a dual-stack socket reports them."""

Network = IPv4Network | IPv6Network
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

MAX_DISCARDED_BYTES = 64 * 2**20
"""Most bytes of an oversized body that are read and discarded. A client that is cut off while it
sends does not read the error."""


@dataclass(frozen=True)
class Limits:
    """Limits of the service in bytes, counts and seconds.

    The latest ``uploads`` pictures are kept. At most ``in_flight`` requests are processed and
    ``waiting`` jobs queued at a time; further requests get status 503. ``batch`` is the most jobs
    per batch of the model.

    At most ``connections`` are open, ``address_connections`` of them from one address (0: no
    limit), and ``spare_connections`` more for health checks; see `Connections`.

    Time-outs are for a whole phase, however many parts it has: ``header_timeout`` for the headers
    of a request, ``body_timeout`` for its body, ``timeout`` for the job, ``send_timeout`` for
    sending the response, ``keep_alive`` between two requests, ``drain`` for jobs at shutdown.
    """

    upload_bytes: int = 10 * 2**20
    json_bytes: int = 2**18
    pixels: int = 40_000_000
    shown_side: int = 1280
    uploads: int = 64
    in_flight: int = 128
    waiting: int = 256
    batch: int = 32
    connections: int = 512
    address_connections: int = 128
    spare_connections: int = 16
    timeout: float = 20.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    send_timeout: float = 30.0
    keep_alive: float = 15.0
    drain: float = 5.0


@dataclass(eq=False)
class Connection:
    """An open connection; ``close`` ends it at once."""

    client: str
    close: Callable[[], None]
    groups: Sequence[Group]
    spare: bool


class Group:
    """Connections that share a limit; ``waiting`` are those that may be closed, in order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.connections: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}

    @property
    def full(self) -> bool:
        return len(self.connections) >= self.limit

    def find_longest_waiting(self) -> Connection | None:
        return next(iter(self.waiting), None)


class Connections:
    """All connections of a server.

    Connections from ``proxies`` have no limit per address, as they serve many clients.
    """

    def __init__(self, limits: Limits, proxies: Collection[Network] = ()) -> None:
        self._limits, self._proxies = limits, tuple(proxies)
        self._all = Group(limits.connections)
        self._spare = Group(limits.spare_connections)
        self._clients: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._all.connections) + len(self._spare.connections)

    def try_admit(self, address: str, close: Callable[[], None]) -> Connection | None:
        """Register a new connection; None if even all spare ones are busy."""
        client = client_of(address)
        own = self._clients.get(client) or Group(self._limits.address_connections)
        groups = [own, self._all] if self._limited(address) else [self._all]
        spare = not all(self._make_room(group) for group in groups)
        if spare:
            groups = [self._spare]
            if not self._make_room(self._spare):
                return None
        elif own in groups:
            self._clients[client] = own
        connection = Connection(client, close, groups, spare)
        for group in groups:
            group.connections.add(connection)
        return connection

    def wait(self, connection: Connection) -> None:
        """Mark that the service waits for this client, so that the connection may be closed."""
        for group in connection.groups:
            if connection in group.connections:
                group.waiting.pop(connection, None)
                group.waiting[connection] = None

    def work(self, connection: Connection) -> None:
        """Mark that this client waits for the service, so that the connection stays open."""
        for group in connection.groups:
            group.waiting.pop(connection, None)

    def release(self, connection: Connection) -> None:
        """Remove a connection; a second call does nothing."""
        for group in connection.groups:
            group.waiting.pop(connection, None)
            group.connections.discard(connection)
        own = self._clients.get(connection.client)
        if own is not None and not own.connections:
            del self._clients[connection.client]

    def _make_room(self, group: Group) -> bool:
        """Whether the group has room, after closing the longest-waiting connection if needed."""
        if not group.full:
            return True
        displaced = group.find_longest_waiting()
        if displaced is None:
            return False
        self.release(displaced)
        displaced.close()
        return True

    def _limited(self, address: str) -> bool:
        if not self._limits.address_connections:
            return False
        try:
            parsed = ip_address(address)
        except ValueError:
            return False  # a Unix socket has no addresses
        forms = {parsed, _unmapped(parsed)}
        return not any(form in network for network in self._proxies for form in forms)


def client_of(address: str) -> str:
    """The identity of a client: an IPv4 address, or the network of an IPv6 address.

    >>> client_of("192.0.2.7"), client_of("::ffff:192.0.2.7"), client_of("2001:db8::1:2:3:4")
    ('192.0.2.7', '192.0.2.7', '2001:db8::/64')
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    parsed = _unmapped(parsed)
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    return str(ip_network((int(parsed), IPV6_CLIENT), strict=False))


def proxy_networks(proxies: Collection[str]) -> list[Network]:
    """Networks of trusted proxies; those of IPv4 also as IPv4-mapped IPv6 networks.

    >>> [str(network) for network in proxy_networks(["10.0.0.5", "fd00::/8"])]
    ['10.0.0.5/32', '::ffff:a00:5/128', 'fd00::/8']
    """
    try:
        return [form for proxy in proxies for form in _forms(ip_network(proxy))]
    except ValueError as error:
        raise ConfigError(
            f"--trust-proxy: {error}; give an address such as 10.0.0.5, or a network such as "
            "10.0.0.0/24"
        ) from None


def _forms(network: Network) -> list[Network]:
    """A network, and if it is one of IPv4, also its IPv4-mapped form."""
    if isinstance(network, IPv6Network):
        if not network.subnet_of(IPV4_MAPPED):
            return [network]
        bits = network.prefixlen - IPV4_MAPPED.prefixlen
        network = IPv4Network((int(network.network_address) & 0xFFFFFFFF, bits))
    mapped = int(IPV4_MAPPED.network_address) + int(network.network_address)
    return [network, IPv6Network((mapped, IPV4_MAPPED.prefixlen + network.prefixlen))]


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address behind an IPv4-mapped one such as ::ffff:192.0.2.7; others unchanged."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


class Body:
    """The body of a request, read within a limit on its size and time.

    ``on_complete`` is called once, after the last part; it may raise a `Problem`. ``problem`` is
    that one, or the one for a body that is too long or too slow. An ``empty`` body is complete with
    the headers, so that nothing is timed: a time-out costs two iterations of the event loop.
    """

    def __init__(
        self,
        receive: Receive,
        most: int,
        seconds: float,
        on_complete: Callable[[], None],
        empty: bool = False,
    ) -> None:
        self._receive, self._most, self._on_complete = receive, most, on_complete
        self._empty = empty
        self._until = asyncio.get_running_loop().time() + seconds
        self._size, self._complete = 0, False
        self._read: Message | None = None
        self.problem: Problem | None = None

    async def receive(self) -> Message:
        """The next ASGI message."""
        if self._read is not None:
            message, self._read = self._read, None
            return message
        if self._complete:  # the only further message is the disconnect
            return await self._receive()
        try:
            return await self._next()
        except Problem as problem:
            self.problem = problem
            raise

    async def read(self) -> bool:
        """Read the whole body, which `receive` then returns as one message.

        False if the client disconnects.
        """
        parts = []
        while not self._complete:
            message = await self.receive()
            if message["type"] != "http.request":
                return False
            parts.append(message.get("body", b""))
        self._read = {"type": "http.request", "body": b"".join(parts), "more_body": False}
        return True

    async def discard(self) -> None:
        """Read and discard the rest, up to a limit in bytes and the time-out of the body."""
        size = 0
        with suppress(asyncio.TimeoutError):
            while size < MAX_DISCARDED_BYTES and not self._complete:
                message = await asyncio.wait_for(self._receive(), self._remaining())
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    self._complete = True

    async def _next(self) -> Message:
        try:
            next_part = self._receive()
            timed = not self._empty
            message = await (asyncio.wait_for(next_part, self._remaining()) if timed else next_part)
        except asyncio.TimeoutError:
            raise Problem(408, "the body of the request did not arrive in time") from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._most:
                self._complete = not message.get("more_body", False)
                raise too_long(self._most)
            if not message.get("more_body", False):
                self._complete = True
                self._on_complete()
        return message

    def _remaining(self) -> float:
        return self._until - asyncio.get_running_loop().time()


def too_long(most: int) -> Problem:
    size = f"{most // 2**20} MiB" if most >= 2**20 else f"{most // 2**10} KiB"
    return Problem(413, f"the request body is too long; at most {size} are allowed")
