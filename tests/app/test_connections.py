"""Limits on connections: which one is closed for a new one, and what counts as one client."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from counterfoil.app.connections import Connection, Connections, Limits, proxy_networks
from counterfoil.core.errors import ConfigError


class Opened:
    """Connections by number, and which of them were closed for others."""

    def __init__(self, limits: Limits, proxies=()) -> None:
        self.connections = Connections(limits, proxies)
        self.closed: list[int] = []

    def add(self, number: int, address: str = "192.0.2.1", waits: bool = True) -> Connection | None:
        connection = self.connections.try_admit(address, lambda: self.closed.append(number))
        if connection is not None and waits:
            self.connections.wait(connection)
        return connection


def test_the_connection_that_waits_longest_gives_way() -> None:
    opened = Opened(Limits(connections=3))
    first, second = opened.add(1), opened.add(2)
    opened.add(3)
    assert first is not None
    assert second is not None
    opened.connections.work(first)
    opened.connections.wait(first)  # waits again, since now
    opened.connections.work(second)  # is being answered
    for number in (4, 5, 6):
        opened.add(number)
    assert opened.closed == [3, 1, 4]
    assert len(opened.connections) == 3


def test_an_address_gives_way_to_itself_before_others_do() -> None:
    opened = Opened(Limits(connections=4, address_connections=2))
    opened.add(1, "192.0.2.7")
    for number in range(2, 8):
        opened.add(number)
    assert opened.closed == [2, 3, 4, 5]


def test_networks_of_ipv6_are_one_client_and_proxies_none() -> None:
    limits = Limits(connections=100, address_connections=2)
    opened = Opened(limits, [ip_network("10.0.0.0/8")])
    for number in range(5):
        opened.add(number, f"2001:db8::{number}")
    assert opened.closed == [0, 1, 2]
    for number in range(5, 20):
        opened.add(number, "10.1.2.3")
    assert opened.closed == [0, 1, 2]


@pytest.mark.parametrize("proxy", ["10.0.0.5", "10.0.0.0/24", "::ffff:10.0.0.5", "::ffff:0:0/96"])
def test_a_proxy_over_ipv4_is_known_on_a_socket_for_ipv6_as_well(proxy) -> None:
    limits = Limits(connections=100, address_connections=2)
    opened = Opened(limits, proxy_networks([proxy]))
    for number in range(5):
        opened.add(number, "::ffff:10.0.0.5")
        opened.add(number, "10.0.0.5")
    assert opened.closed == []
    for number in range(5):
        opened.add(number, "fd00::10.0.0.5")
    assert opened.closed == [0, 1, 2]


def test_a_proxy_is_known_by_its_ipv4_address_whatever_its_network_is_written_as() -> None:
    opened = Opened(Limits(address_connections=1), [ip_network("10.0.0.0/8")])
    for number in range(3):
        opened.add(number, "::ffff:10.1.2.3")
    assert opened.closed == []


def test_when_all_are_being_answered_spare_places_are_left() -> None:
    opened = Opened(Limits(connections=2, spare_connections=1))
    assert [opened.add(number, waits=False) is None for number in (1, 2)] == [False, False]
    spare = opened.add(3)
    assert spare is not None
    assert spare.spare
    assert opened.add(4, waits=False) is not None  # 3 waited
    assert opened.closed == [3]
    assert opened.add(5) is None


def test_places_that_are_given_back_are_forgotten() -> None:
    opened = Opened(Limits(connections=2, address_connections=1))
    connection = opened.add(1)
    assert connection is not None
    for _ in range(2):
        opened.connections.release(connection)
    opened.connections.wait(connection)
    assert len(opened.connections) == 0
    opened.add(2)
    assert opened.closed == []


def test_a_proxy_that_is_no_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"proxy\.example"):
        proxy_networks(["10.0.0.1", "proxy.example"])
