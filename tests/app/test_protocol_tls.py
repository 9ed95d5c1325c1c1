"""TLS of the service's own: files that do not fit are named, and slow handshakes are cut off."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from counterfoil.app.application import tls_context
from counterfoil.app.connections import Limits
from counterfoil.app.protocol import EARLY_BYTES, EarlyData
from counterfoil.core.errors import ConfigError
from tests.app.conftest import Client, running
from tests.cli.test_cli import invoke

# for these tests alone: a certificate for localhost, its key, the same encrypted, another key
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmjCCAUGgAwIBAgIUAyqS1dL/mPSoeC1h7rzBQKFzKXYwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTExNjE1NDgwNVoYDzIxMjYxMDIz
MTU0ODA1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAR8oOPTg4SV4yHDKU7ptWy5HLky4Ww2xPe/WGMGnI456QEXPnF4iWHO
Ga8wPDh2GXvT2xsACzVJgbPf+1mhnfXno28wbTAdBgNVHQ4EFgQUSBh+pCOvxzBf
9ShXPY6Y3qmwQZ0wHwYDVR0jBBgwFoAUSBh+pCOvxzBf9ShXPY6Y3qmwQZ0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDRwAwRAIgR451kbxe233vuAvBM4NHzN1VBsMlTvxm2hGKgDTf0qsCIDqN
IPukAusgjm1zp8904Q5K42/qu04ZmkBFyVUAslbE
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg0ZmN/aO4pmCMfd3k
cLle3YVwp1ycUu/lyjrV9eIMvZuhRANCAAR8oOPTg4SV4yHDKU7ptWy5HLky4Ww2
xPe/WGMGnI456QEXPnF4iWHOGa8wPDh2GXvT2xsACzVJgbPf+1mhnfXn
-----END PRIVATE KEY-----
"""
ENCRYPTED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAgVmZf+B5XyNAICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEELSuuTQbSdtSh3stp1OgYR4EgZAf
Qg78Jm/cEOZ83U001OSKRFabTNtXh3R7aIIQj14DIgmmJuP7PkQUtkYbnYcKv2/4
MuWt6SMCQkwjHcZD+Gg/Ms1pfyJFs2styZQlLmND8rafqZcACQejEdmXW+yZUVh/
UUX0bqJ1KtKUUXIfJKhYcc0yRBWjlcOJ3aKsMr+utAh5cSOhA4K0difMEUTDlLE=
-----END ENCRYPTED PRIVATE KEY-----
"""
OTHER_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg/jsXpvtOR6DDp/Ir
G6OEWw0X69QEc8dozEVWxLK6u3qhRANCAAQuKrzP7FYjb7SFHWb61SevS9o4n/yk
7TyR4gDPakVVssvt1R3cBhiSJn3WzHs/EHcgGuMhTeQ8xyiDlYCMD+AP
-----END PRIVATE KEY-----
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_text(CERTIFICATE)
    (folder / "key.pem").write_text(KEY)
    (folder / "both.pem").write_text(CERTIFICATE + KEY)
    (folder / "other.pem").write_text(OTHER_KEY)
    (folder / "encrypted.pem").write_text(ENCRYPTED)
    (folder / "text.pem").write_text("not a key at all")
    return folder


@pytest.fixture(scope="module")
def secure(content, files):
    tls = tls_context(files / "cert.pem", files / "key.pem")
    with running(content, Limits(connections=8), tls=tls) as client:
        yield client


@pytest.fixture(scope="module")
def hasty(content, files):
    """A service that gives a client one second for its handshake and headers."""
    tls = tls_context(files / "cert.pem", files / "key.pem")
    with running(content, Limits(header_timeout=1), tls=tls) as client:
        yield client


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=CERTIFICATE)
    context.verify_mode, context.check_hostname = ssl.CERT_REQUIRED, True
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def asked(client: Client, request: bytes) -> bytes:
    """What is answered over TLS, until the connection is closed."""
    with (
        socket.create_connection((client.host, client.port), timeout=60) as plain,
        client_context().wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_the_service_speaks_tls_with_the_files_named(secure) -> None:
    body = json.dumps({"text": "two cows", "k": 2}).encode()
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = asked(secure, head + body)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"hits"' in answer


def test_headers_that_never_end_are_cut_off_over_tls(hasty) -> None:
    for _ in range(10):
        try:
            answer = asked(hasty, b"GET / HTTP/1.1\r\nX-Slow: ")
            break
        except OSError:  # a busy machine: the handshake took the whole second
            continue
    assert answer.startswith(b"HTTP/1.1 408")


class AtOnce:
    """A connection over TLS that sends the end of its handshake together with a request."""

    def __init__(self, client: Client, request: bytes) -> None:
        self._encrypted, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context().wrap_bio(
            self._encrypted, outgoing, server_hostname="localhost"
        )
        self.socket = socket.create_connection((client.host, client.port), timeout=60)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.socket.sendall(outgoing.read())
                self._encrypted.write(self.socket.recv(65536))
        self._tls.write(request)
        self.socket.sendall(outgoing.read())

    def read(self) -> bytes:
        """All that is answered, until the server says that this was all."""
        answer = b""
        while True:
            try:
                part = self._tls.read(65536)
            except ssl.SSLWantReadError:
                encrypted = self.socket.recv(65536)
                assert encrypted, f"cut off after {answer!r}"
                self._encrypted.write(encrypted)
                continue
            except ssl.SSLZeroReturnError:
                return answer
            if not part:
                return answer
            answer += part


GET = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("spaces", [0, 200_000])
def test_a_request_right_behind_the_handshake_is_not_lost(secure, spaces) -> None:
    body = json.dumps({"text": "two cows", "k": 2}).encode() + b" " * spaces
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(15):
        connection = AtOnce(secure, head + body)
        with connection.socket:
            answer = connection.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.endswith(b"}")


def test_clients_in_parallel_are_all_answered_over_tls(secure) -> None:
    context = client_context()

    def ask(_: int) -> int:
        connection = http.client.HTTPSConnection(
            "localhost", secure.port, context=context, timeout=60
        )
        try:
            connection.request("GET", "/api/about")
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(60))) == [200] * 60


@pytest.mark.parametrize("reset", [True, False])
def test_clients_that_leave_right_behind_the_handshake_give_their_places_back(
    secure, reset
) -> None:
    for _ in range(20):
        connection = AtOnce(secure, GET)
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.socket.close()
    metrics = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    until, most = time.monotonic() + 60, 9
    while most > 1 and time.monotonic() < until:
        result = re.search(rb"\ncounterfoil_connections (\d+)", asked(secure, metrics))
        assert result is not None
        most = int(result[1])
    assert most == 1  # the one that asks


def test_what_is_sent_before_a_connection_is_open_is_kept_up_to_a_limit() -> None:
    aborted: list[bool] = []
    early = EarlyData(lambda: aborted.append(True))
    early.data_received(b"GET / ")
    early.data_received(b"HTTP/1.1")
    assert bytes(early.data) == b"GET / HTTP/1.1"
    assert not aborted
    early.data_received(bytes(EARLY_BYTES))
    assert aborted
    assert not early.data


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_a_handshake_that_never_ends_is_cut_off(hasty, sent) -> None:
    with socket.create_connection((hasty.host, hasty.port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_connections_without_a_handshake_keep_nobody_out(secure) -> None:
    silent = [socket.create_connection((secure.host, secure.port)) for _ in range(24)]
    try:
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert asked(secure, request).startswith(b"HTTP/1.1 200")
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    ("certificate", "key", "mistake"),
    [
        ("missing.pem", "key.pem", r"--tls-cert .*missing\.pem: cannot be read"),
        ("cert.pem", "missing.pem", r"--tls-key .*missing\.pem: cannot be read"),
        ("cert.pem", "other.pem", r"other\.pem is not the key of --tls-cert .*cert\.pem"),
        ("cert.pem", "text.pem", r"not a certificate and its private key"),
        ("text.pem", "key.pem", r"not a certificate and its private key"),
        ("cert.pem", "encrypted.pem", r"encrypted.*openssl pkey"),
        ("cert.pem", None, r"give both"),
        (None, "key.pem", r"without --tls-cert"),
    ],
)
def test_files_of_tls_that_do_not_fit_are_named(run, files, certificate, key, mistake) -> None:
    given = [
        part
        for option, name in (("--tls-cert", certificate), ("--tls-key", key))
        if name is not None
        for part in (option, files / name)
    ]
    with pytest.raises(ConfigError, match=mistake):
        invoke("serve", run, *given)


def test_a_certificate_and_its_key_may_be_one_file(files) -> None:
    assert tls_context(files / "both.pem", None)
