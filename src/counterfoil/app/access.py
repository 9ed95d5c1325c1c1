"""Access control of the web service: allowed host names, same-origin checks, the token."""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from collections.abc import Collection, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from counterfoil.app.problems import Problem
from counterfoil.core.errors import ConfigError

# underscores are not standard, but common in the host names of containers
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME = re.compile(rf"(?:{LABEL}\.)*{LABEL}")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label with which browsers read a name as an IPv4 address."""

MAX_NAME_LENGTH = 253

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
"""Methods that change nothing; browsers hide their responses from other sites."""

HEALTH_PATH = "/healthz"

OPEN_PATHS = {HEALTH_PATH, "/", "/docs", "/favicon.ico", "/api/session"}
"""Paths that need no token: the empty page, and the route that accepts the token."""

TOKEN = re.compile(r"[!-~]{16,}")

MAX_QUOTED_CHARS = 100
"""Most characters of a Host header that an error quotes."""

PORTS = {"http": 80, "https": 443}


def host_in(header: bytes) -> str:
    """The name in a Host header, without its port.

    >>> host_in(b"localhost:8000"), host_in(b"[::1]:8000"), host_in(b"Match.example.")
    ('localhost', '[::1]', 'match.example')
    """
    return _canonical(header.decode("latin-1"))


def find_host_name(given: str) -> str | None:
    """A configured name in the form that `host_in` returns; None if it is not a host name.

    >>> find_host_name("Match.example:8443"), find_host_name("::1"), find_host_name("*.example")
    ('match.example', '[::1]', None)
    >>> find_host_name("bücher.example")
    'xn--bcher-kva.example'
    """
    name = _canonical(f"[{given}]" if _is_ipv6(given) else given)
    if name.startswith("["):
        return name if name.endswith("]") and _is_ipv6(name[1:-1]) else None
    name = name if name.isascii() else _punycode(name)
    valid = len(name) <= MAX_NAME_LENGTH and NAME.fullmatch(name) is not None
    if valid and NUMBER.fullmatch(name.rpartition(".")[2]):
        valid = _is_ipv4(name)
    return name if valid else None


def _canonical(host: str) -> str:
    """A host in lower case, without the port and without the dot of a fully qualified name."""
    host = host.lower()
    name, _, port = host.rpartition(":")
    host = name if name and port.isascii() and port.isdecimal() else host
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return f"[{IPv6Address(host[1:-1])}]"
    return host.removesuffix(".")


def _punycode(name: str) -> str:
    """The ASCII form of a name; "" if browsers and Python's codec might encode it differently.

    The codec implements IDNA 2003. It replaces some letters, such as ß, that browsers encode.
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


class Access:
    """Access rules that every request must meet.

    Without ``hosts``, any host name is accepted. With a ``token``, requests need the header
    ``Authorization: Bearer TOKEN``, or the cookie that the page gets for the token.
    """

    def __init__(self, hosts: Collection[str] | None = None, token: str | None = None) -> None:
        if token is not None and not TOKEN.fullmatch(token):
            raise ConfigError(
                f"the token has {len(token)} characters; expected at least 16 ASCII characters "
                "without spaces. Make one with: openssl rand -hex 16"
            )
        self.hosts = None if hosts is None else frozenset(map(_allowed_name, hosts))
        self._token = token
        secret = "" if token is None else token
        # a digest is valid in a cookie for any token, and does not reveal the token
        self.cookie = hmac.new(secret.encode(), b"counterfoil cookie", hashlib.sha256).hexdigest()
        self.cookie_name = f"counterfoil-{hashlib.sha256(self.cookie.encode()).hexdigest()[:8]}"

    @classmethod
    def to(cls, host: str, names: Collection[str] = (), token: str | None = None) -> Access:
        """Rules for a service that listens on ``host`` and has further ``names``.

        A service on a loopback address accepts only names of this machine. This prevents DNS
        rebinding, in which another site's name resolves to this machine.
        """
        if not is_loopback(host):
            if token is None:
                raise ConfigError(
                    f"--host {host}: other machines can reach it, so it needs a token; set "
                    "COUNTERFOIL_TOKEN or --token-file"
                )
            if not names:
                return cls(None, token)
        own = () if find_host_name(host) is None else (host,)
        return cls({*LOOPBACK, *own, *names}, token)

    @property
    def locked(self) -> bool:
        return self._token is not None

    def opens(self, token: str) -> bool:
        """Whether this is the token, compared in constant time."""
        return self._token is None or _same(token, self._token)

    def find_problem(self, scope: Mapping[str, Any]) -> Problem | None:
        """Why a request is refused; None if it is allowed."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path = scope["path"]
        if path == HEALTH_PATH and scope.get("method") in SAFE_METHODS:
            return None  # under any host name: health checks often use a bare address
        if self.hosts is not None and host_in(headers.get(b"host", b"")) not in self.hosts:
            given = headers.get(b"host", b"").decode("latin-1")[:MAX_QUOTED_CHARS]
            return Problem(421, f"Host {given!r} is not a name of this service; see --allow-host")
        if scope.get("method") not in SAFE_METHODS and not _same_origin(scope, headers):
            return Problem(
                403,
                "cross-site request refused: Origin or Sec-Fetch-Site does not match this service",
            )
        needs_token = path not in OPEN_PATHS and not path.startswith("/static/")
        if self.locked and needs_token and not self._presents_token(headers):
            return Problem(
                401,
                "missing or wrong token; open the address with #token=… that the service printed, "
                "or send Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )
        return None

    def _presents_token(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and self.opens(given.strip()):
            return True
        for cookie in headers.get(b"cookie", b"").decode("latin-1").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.cookie_name:
                return _same(value, self.cookie)
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "myhost")]
    [True, True, True, False, False]
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _same_origin(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request comes from the service's own page, or not from a browser.

    Browsers set these headers, and pages cannot change them.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None and site not in (b"same-origin", b"none"):
        return False
    given = headers.get(b"origin")
    if given is None:
        return True
    try:
        origin = urlsplit(given.decode("ascii"))
        host = urlsplit(f"//{headers.get(b'host', b'').decode('ascii')}")
        default = PORTS[origin.scheme]  # other schemes and "null" are not ours
        same = (origin.hostname, origin.port or default) == (host.hostname, host.port or default)
    except (ValueError, KeyError):
        return False
    # behind a proxy that terminates TLS, the scheme here may be http for an https origin
    return same and not (scope.get("scheme") in ("https", "wss") and origin.scheme != "https")


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def _allowed_name(given: str) -> str:
    name = find_host_name(given)
    if name is None:
        raise ConfigError(
            f"--allow-host {given!r}: not a host name or an address; give one such as "
            "match.example or 192.0.2.7, without scheme, path or wildcard"
        )
    return name
