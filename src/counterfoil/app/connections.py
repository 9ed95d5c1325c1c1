"""Limits on clients: sizes of requests, numbers of connections, bodies in a size and a time.

A connection that makes the service wait (for a request, for the rest of a body, for its answer to
be read) gives way to a new one when a limit is reached, the one that waited longest first. One
whose request is being answered never does. When nothing can give way, a new connection gets a
spare place, which answers health checks alone. So idle and slow clients cannot lock others out.
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
"""Of a sentence. A caption has a dozen words; encoding time grows with them."""

TEXT_WORDS = 120
TEXTS = 64
"""Sentences, and images, of one scoring request."""

RESULTS = 100
PAGE = 100
"""Images or findings listed at once."""

ID_LETTERS = 1000

IPV6_CLIENT = 64
"""Bits of an IPv6 address that stand for one client; it chooses the rest as it likes."""

IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as a socket for IPv6 and IPv4 shows them."""

Network = IPv4Network | IPv6Network
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

MAX_DISCARDED_BYTES = 64 * 2**20
"""Bytes of a body that is too long that are still taken, and forgotten: a client that cannot send
on does not listen to why."""


@dataclass(frozen=True)
class Limits:
    """Sizes, numbers and seconds that the service holds itself and its clients to.

    ``uploads`` pictures are kept, the oldest go first. At most ``in_flight`` requests are worked
    on and ``waiting`` pieces of work queued at a time; more are told to come back. ``batch`` is how
    many pieces of work go through the model together.

    At most ``connections`` are open, ``address_connections`` of them from one address (0: any
    number), and ``spare_connections`` beyond, for health checks; see `Connections`.

    Each time-out is for all of something, not for its parts: ``header_timeout`` for the headers of
    a request, ``body_timeout`` for its body, ``timeout`` for the work, ``send_timeout`` for reading
    the answer, ``keep_alive`` between two requests, ``drain`` for work under way at shutdown.
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
class Place:
    """A connection's place among the others; ``close`` ends the connection at once."""

    client: str
    close: Callable[[], None]
    groups: Sequence[Group]
    spare: bool


class Group:
    """Connections that share a limit; ``waiting`` are those that may be closed, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.places: set[Place] = set()
        self.waiting: dict[Place, None] = {}

    @property
    def full(self) -> bool:
        return len(self.places) >= self.limit

    def find_longest_waiting(self) -> Place | None:
        return next(iter(self.waiting), None)


class Connections:
    """All connections of a server.

    Those from ``proxies`` have no limit per address: they carry the requests of many clients.
    """

    def __init__(self, limits: Limits, proxies: Collection[Network] = ()) -> None:
        self._limits, self._proxies = limits, tuple(proxies)
        self._all = Group(limits.connections)
        self._spare = Group(limits.spare_connections)
        self._clients: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._all.places) + len(self._spare.places)

    def try_admit(self, address: str, close: Callable[[], None]) -> Place | None:
        """A place for a new connection; None when even the spare ones are all answering."""
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
        place = Place(client, close, groups, spare)
        for group in groups:
            group.places.add(place)
        return place

    def wait(self, place: Place) -> None:
        """From now on the service waits for this client."""
        for group in place.groups:
            if place in group.places:
                group.waiting.pop(place, None)
                group.waiting[place] = None

    def work(self, place: Place) -> None:
        """From now on this client waits for the service."""
        for group in place.groups:
            group.waiting.pop(place, None)

    def release(self, place: Place) -> None:
        """Give a place back; a second time does no harm."""
        for group in place.groups:
            group.waiting.pop(place, None)
            group.places.discard(place)
        own = self._clients.get(place.client)
        if own is not None and not own.places:
            del self._clients[place.client]

    def _make_room(self, group: Group) -> bool:
        """Whether one more fits in, if need be in place of the one that has waited longest."""
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
    """What stands for one client: an IPv4 address, or the network of an IPv6 address.

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
    """Networks of trusted proxies, those of IPv4 in both of their forms.

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
    """A network, and if it is one of IPv4, also as a socket for IPv6 and IPv4 shows it."""
    if isinstance(network, IPv6Network):
        if not network.subnet_of(IPV4_MAPPED):
            return [network]
        bits = network.prefixlen - IPV4_MAPPED.prefixlen
        network = IPv4Network((int(network.network_address) & 0xFFFFFFFF, bits))
    mapped = int(IPV4_MAPPED.network_address) + int(network.network_address)
    return [network, IPv6Network((mapped, IPV4_MAPPED.prefixlen + network.prefixlen))]


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address of a client that a socket for IPv6 and IPv4 shows as ::ffff:192.0.2.7."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


class Body:
    """What a client sends after the headers.

    ``on_complete`` is called once, when the last of it is there; it may raise a `Problem`. That,
    and what is too long or too slow, is kept as ``problem``.
    """

    def __init__(
        self, receive: Receive, most: int, seconds: float, on_complete: Callable[[], None]
    ) -> None:
        self._receive, self._most, self._on_complete = receive, most, on_complete
        self._until = asyncio.get_running_loop().time() + seconds
        self._size, self._complete = 0, False
        self._read: Message | None = None
        self.problem: Problem | None = None

    async def receive(self) -> Message:
        """The next part, as ASGI has it."""
        if self._read is not None:
            message, self._read = self._read, None
            return message
        if self._complete:  # from here on it only waits for the client to go away
            return await self._receive()
        try:
            return await self._next()
        except Problem as problem:
            self.problem = problem
            raise

    async def read(self) -> bool:
        """Receive all of it, to be had from `receive` as one part; False if the client leaves."""
        parts = []
        while not self._complete:
            message = await self.receive()
            if message["type"] != "http.request":
                return False
            parts.append(message.get("body", b""))
        self._read = {"type": "http.request", "body": b"".join(parts), "more_body": False}
        return True

    async def throw_away(self) -> None:
        """Take the rest, up to a limit, for as long as there is time."""
        taken = 0
        with suppress(asyncio.TimeoutError):
            while taken < MAX_DISCARDED_BYTES and not self._complete:
                message = await asyncio.wait_for(self._receive(), self._remaining())
                taken += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    self._complete = True

    async def _next(self) -> Message:
        try:
            message = await asyncio.wait_for(self._receive(), self._remaining())
        except asyncio.TimeoutError:
            raise Problem(408, "the body of the request did not come in time") from None
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
    return Problem(413, f"the request is too long: at most {size} are read")
