"""Names that a service is called by: in a Host header, and as --allow-host gives them."""

from __future__ import annotations

import re
import unicodedata
from ipaddress import IPv4Address, IPv6Address

# underscores are no part of the standard, but of many names in networks of containers
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME = re.compile(rf"(?:{LABEL}\.)*{LABEL}")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label that makes browsers read a name as an IPv4 address."""

LONGEST = 253


def host_in(header: bytes) -> str:
    """The name in a Host header, without its port.

    >>> host_in(b"localhost:8000"), host_in(b"[::1]:8000"), host_in(b"Match.example.")
    ('localhost', '[::1]', 'match.example')
    """
    return _canonical(header.decode("latin-1"))


def find_host_name(given: str) -> str | None:
    """The name as `host_in` reads it from requests to it; None if no client sends such a name.

    >>> find_host_name("Match.example:8443"), find_host_name("::1"), find_host_name("*.example")
    ('match.example', '[::1]', None)
    >>> find_host_name("bücher.example")
    'xn--bcher-kva.example'
    """
    name = _canonical(f"[{given}]" if _is_ipv6(given) else given)
    if name.startswith("["):
        return name if name.endswith("]") and _is_ipv6(name[1:-1]) else None
    name = name if name.isascii() else _punycode(name)
    valid = len(name) <= LONGEST and NAME.fullmatch(name) is not None
    if valid and NUMBER.fullmatch(name.rpartition(".")[2]):
        valid = _is_ipv4(name)
    return name if valid else None


def _canonical(host: str) -> str:
    """In lower case, without the port and the dot of a fully qualified name."""
    host = host.lower()
    name, _, port = host.rpartition(":")
    host = name if name and port.isascii() and port.isdecimal() else host
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return f"[{IPv6Address(host[1:-1])}]"
    return host.removesuffix(".")


def _punycode(name: str) -> str:
    """The ASCII form of a name; "" for one that browsers and Python's codec might read differently.

    The codec is of IDNA 2003. It replaces some letters, such as ß, that browsers encode.
    """
    name = unicodedata.normalize("NFC", name)
    try:
        encoded = name.encode("idna")
        return encoded.decode("ascii") if encoded.decode("idna") == name else ""
    except UnicodeError:
        return ""


def _is_ipv6(text: str) -> bool:
    try:
        return IPv6Address(text).scope_id is None
    except ValueError:
        return False


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True
