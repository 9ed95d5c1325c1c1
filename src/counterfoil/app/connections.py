"""Which connections stay open: a cap on all of them, one per client address, and a few spare.

A connection that makes the service wait (for a request, for the rest of a body, for its answer to
be read) gives way to a new one when a limit is reached, the one that waited longest first. One
whose request is being answered never does. When nothing can give way, a new connection gets a
spare place, which answers health checks alone. So idle and slow clients cannot lock others out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from counterfoil.app.limits import Limits
from counterfoil.errors import ConfigError

IPV6_CLIENT = 64
"""Bits of an IPv6 address that stand for one client; it chooses the rest as it likes."""

MAPPED = IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as a socket for IPv6 and IPv4 shows them."""

Network = IPv4Network | IPv6Network


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
        if not network.subnet_of(MAPPED):
            return [network]
        bits = network.prefixlen - MAPPED.prefixlen
        network = IPv4Network((int(network.network_address) & 0xFFFFFFFF, bits))
    mapped = int(MAPPED.network_address) + int(network.network_address)
    return [network, IPv6Network((mapped, MAPPED.prefixlen + network.prefixlen))]


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address of a client that a socket for IPv6 and IPv4 shows as ::ffff:192.0.2.7."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped
