"""Who may ask: other sites in a browser, other names, and the token for other machines."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace

import pytest

from counterfoil.app import application as serving
from counterfoil.app.access import Access
from counterfoil.app.application import create_app, make_server
from counterfoil.cli import app as command_line
from counterfoil.core.errors import ConfigError
from tests.app.conftest import LIMITS, Client, running
from tests.cli.test_cli import invoke

TOKEN = "a-token-of-the-tests"  # noqa: S105
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SEARCH = json.dumps({"text": "two cows", "k": 2}).encode()
JSON = {"Content-Type": "application/json"}


def search(client: Client, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = client.ask("POST", "/api/search", SEARCH, {**JSON, **named})
    if answer.status >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
    return answer.status


@pytest.fixture(scope="module")
def locked(content) -> Iterator[Client]:
    with running(content, LIMITS, access=Access.to("0.0.0.0", token=TOKEN)) as client:  # noqa: S104
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1"},
        {"Origin": "file://"},
        {"Origin": "http://[half"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_an_upload_that_another_site_makes_a_browser_send_is_refused(
    client, photo, headers
) -> None:
    answer = client.upload(photo, **headers)
    assert answer.status == 403
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.ask("DELETE", "/api/images", None, headers).status == 403
    assert client.ask("GET", "/api/about", None, headers).status == 200
    assert client.upload(photo).status == 201  # no browser


def test_requests_of_the_page_itself_are_answered(client) -> None:
    port = client.port
    assert search(client, Origin=client.base, Sec_Fetch_Site="same-origin") == 200
    assert search(client, Host=f"LOCALHOST:{port}", Origin=f"http://localhost:{port}") == 200
    assert search(client, Host=f"[::1]:{port}", Origin=f"http://[::1]:{port}") == 200
    assert search(client, Sec_Fetch_Site="none") == 200
    assert search(client) == 200


def test_a_page_behind_a_proxy_with_tls_is_answered_by_its_name(content) -> None:
    access = Access.to("127.0.0.1", names=["Match.example"])
    with running(content, LIMITS, access=access) as client:
        assert search(client, Host="match.example", Origin="https://match.example") == 200
        assert search(client, Host="match.example", Origin="https://match.example:444") == 403
        assert search(client, Host="other.example", Origin="https://other.example") == 421
        assert search(client, Host=f"127.0.0.1:{client.port}") == 200


def test_a_name_that_was_bound_anew_reaches_nothing_on_this_machine(client) -> None:
    """DNS rebinding: another site's name that suddenly stands for 127.0.0.1."""
    for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.a"):
        assert client.ask("GET", "/api/about", headers={"Host": name}).status == 421
        assert client.ask("GET", "/", headers={"Host": name}).status == 421


@pytest.mark.parametrize(
    "name",
    [
        "", " ", ".", "*", "*.example", "http://match.example", "match.example/", "match.example..",
        "match..example", "-match.example", "match example", "match.example,other.example",
        "user@match.example", "[::1", "[10.0.0.1]", "::1]", "fe80::1%eth0", "256.1.1.1", "10.0.0",
        "a" * 64, "a." * 127 + "a", "straße.example", "bü cher.example", "☃" * 64, ":8000",
        "match.example:http",
    ],
)  # fmt: skip
def test_a_name_to_answer_to_that_no_client_can_send_is_refused(name) -> None:
    with pytest.raises(ConfigError, match=r"--allow-host .*match\.example") as refused:
        Access.to("127.0.0.1", names=[name])
    assert repr(name) in str(refused.value)


def test_the_command_refuses_such_a_name_before_it_opens_anything(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"--allow-host '\*\.example'"):
        invoke("serve", tmp_path, "--allow-host", "*.example")  # nothing there to serve


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("match.example.", "match.example"),
        ("match.example", "match.example.:8000"),
        ("Bücher.example", "xn--bcher-kva.example:8000"),
        ("bu\u0308cher.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "XN--bcher-kva.example"),
        ("match_1", "match_1:8000"),
        ("match.example:8443", "match.example"),
        ("192.0.2.7", "192.0.2.7:8000"),
        ("fd00::0:1", "[fd00::1]:8000"),
        ("[fd00::1]:8000", "[fd00::1]"),
        ("::ffff:192.0.2.7", "[::ffff:c000:207]"),
    ],
)
def test_a_name_to_answer_to_is_compared_as_clients_send_it(name, host) -> None:
    access = Access.to("127.0.0.1", names=[name])
    scope = {"type": "http", "method": "GET", "path": "/", "scheme": "http"}
    assert access.find_problem({**scope, "headers": [(b"host", host.encode())]}) is None
    for other in ("", "x" + host, "evil.example"):
        problem = access.find_problem({**scope, "headers": [(b"host", other.encode())]})
        assert problem is not None, other
        assert problem.status == 421


@pytest.mark.parametrize("host", ["", "0.0.0.0"])  # noqa: S104
def test_a_request_without_a_name_is_refused_if_names_are_given(content, host) -> None:
    access = Access.to(host, names=["match.example"], token=TOKEN)
    with running(content, LIMITS, host=host, access=access) as client:
        assert client.ask("GET", "/", headers={"Host": ""}).status == 421
        assert client.ask("GET", "/", headers={"Host": "match.example"}).status == 200
        with socket.create_connection((client.host, client.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 421")


def test_refusals_say_which_header_does_not_match(client) -> None:
    answer = client.ask("GET", "/", headers={"Host": "evil.example:8000"})
    assert "'evil.example:8000'" in answer.json["detail"]
    answer = client.ask("POST", "/api/search", SEARCH, {**JSON, "Origin": "http://evil.example"})
    assert answer.json["detail"].startswith("cross-site request refused: Origin or Sec-Fetch-Site")


def test_another_origin_opens_no_websocket(content) -> None:
    said: list[dict] = []
    app = create_app(content, LIMITS, Access.to("127.0.0.1"))

    async def receive() -> dict:
        return {"type": "websocket.connect"}

    async def send(message: dict) -> None:
        said.append(message)

    headers = [(b"host", b"localhost:8000"), (b"origin", b"http://evil.example")]
    scope = {"type": "websocket", "path": "/api/search", "headers": headers, "scheme": "ws"}
    asyncio.run(app(scope, receive, send))
    assert said == [{"type": "websocket.close", "code": 1008}]


def test_no_connection_becomes_a_websocket(client) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert client.ask("GET", "/api/search", headers=upgrade).status == 405


def test_without_its_token_a_service_says_nothing(locked, photo) -> None:
    for path in ("/api/about", "/api/images", "/api/picture?image=a", "/metrics", "/openapi.json",
                 "/nowhere"):  # fmt: skip
        answer = locked.get(path)
        assert answer.status == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/problem+json"
    assert locked.upload(photo).status == 401
    for wrong in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"):
        assert search(locked, Authorization=wrong) == 401
    assert set(locked.get("/healthz").json) == {"status", "waiting"}


def test_with_its_token_a_service_answers(locked) -> None:
    assert search(locked, Authorization=f"bearer {TOKEN}") == 200
    assert locked.ask("GET", "/metrics", headers=BEARER).status == 200
    assert search(locked, Authorization=f"Bearer {TOKEN}", Origin="http://evil.example") == 403


def test_the_page_gets_a_cookie_for_the_token(locked, pairs) -> None:
    for path in ("/", "/docs", "/static/app.js", "/static/session.js", "/favicon.ico"):
        assert locked.get(path).status == 200
    assert locked.post("/api/session", {"token": "wrong"}).status == 401
    answer = locked.post("/api/session", {"token": TOKEN})
    assert answer.status == 204
    cookie, *rest = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(rest)
    assert TOKEN not in cookie
    headers = {"Cookie": f"a=b; {cookie}"}
    picture = f"/api/picture?image={pairs.test.ids[0]}"
    assert locked.ask("GET", picture, headers=headers).status == 200
    assert locked.ask("GET", picture, headers={"Cookie": cookie + "0"}).status == 401
    evil = {**JSON, "Origin": "http://evil.example"}
    sent = json.dumps({"token": TOKEN}).encode()
    assert locked.ask("POST", "/api/session", sent, evil).status == 403


def test_a_forwarded_address_is_believed_of_a_trusted_proxy_alone(content) -> None:
    sent = json.dumps({"token": TOKEN}).encode()
    headers = {**JSON, "X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
    access = Access.to("127.0.0.1", token=TOKEN)
    for proxies, secure in (((), False), (("127.0.0.0/8",), True)):
        with running(content, LIMITS, access=access, proxies=proxies) as client:
            answer = client.ask("POST", "/api/session", sent, headers)
            assert ("Secure" in answer.headers["set-cookie"].split("; ")) is secure


def test_a_forwarded_address_is_believed_of_a_proxy_on_a_socket_for_ipv6_and_ipv4(content) -> None:
    sent = json.dumps({"token": TOKEN}).encode()
    headers = {**JSON, "X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
    try:
        serving.listen("::", 0).close()
    except ConfigError:
        pytest.skip("no IPv6 on this machine")
    access = Access.to("::", token=TOKEN)
    for proxy, secure in (("127.0.0.1", True), ("127.0.0.0/8", True), ("127.0.0.2", False)):
        with running(content, LIMITS, host="::", access=access, proxies=[proxy]) as client:
            answer = client.ask("POST", "/api/session", sent, headers)
            assert ("Secure" in answer.headers["set-cookie"].split("; ")) is secure


def test_a_forwarded_address_has_a_limit_of_requests_at_once(content) -> None:
    limits = replace(LIMITS, address_connections=2, body_timeout=60)
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"X-Forwarded-For: 192.0.2.1\r\nExpect: 100-continue\r\nConnection: close\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(SEARCH)
    with running(content, limits, proxies=["127.0.0.1"]) as client:

        def status(address: str, path: str = "/api/about") -> int:
            return client.ask("GET", path, headers={"X-Forwarded-For": address}).status

        place = (client.host, client.port)
        with socket.create_connection(place, 60) as one, socket.create_connection(place, 60) as two:
            for connection in (one, two):
                connection.sendall(head)
                assert connection.recv(100).startswith(b"HTTP/1.1 100")  # its body is waited for
            refused = client.ask("GET", "/api/about", headers={"X-Forwarded-For": "192.0.2.1"})
            assert refused.status == 429
            assert refused.headers["retry-after"] == "1"
            assert "at most 2 requests" in refused.json["detail"]
            assert status("192.0.2.1", "/healthz") == 200
            assert status("192.0.2.2") == 200
            for connection in (one, two):
                connection.sendall(SEARCH)
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until = time.monotonic() + 60
        while status("192.0.2.1") != 200:
            assert time.monotonic() < until, "its requests are still counted"


def test_a_service_for_other_machines_is_not_made_without_a_token(content, run, tmp_path) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        make_server(content, "0.0.0.0", LIMITS)  # noqa: S104
    with pytest.raises(ConfigError, match="at least 16"):
        Access.to("::", token="short")
    (tmp_path / "token").write_text("\n")
    for more, mistake in (
        (["--token-file", tmp_path / "token"], "0 characters"),
        (["--token-file", tmp_path / "none"], "cannot be read"),
        (["--token-file", tmp_path / "token", "--token", TOKEN], "two tokens"),
        (["--trust-proxy", "proxy"], "--trust-proxy"),
    ):
        with pytest.raises(ConfigError, match=mistake):
            invoke("serve", run, *more)


@contextmanager
def command(monkeypatch, *arguments: object) -> Iterator[tuple[Client, str]]:
    """`counterfoil serve` on a thread of this process, and what it printed at its start."""
    started: list[serving.Server] = []

    class NotedServer(serving.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started.append(self)

    monkeypatch.setattr(serving, "Server", NotedServer)
    printed = io.StringIO()
    with redirect_stdout(printed), ThreadPoolExecutor(1) as thread:
        options = ["serve", *map(str, arguments), "--port", "0"]
        done = thread.submit(command_line, options, standalone_mode=False)
        try:
            while not started:
                assert not done.done(), done.result()
                time.sleep(0.01)
            port = started[0].servers[0].sockets[0].getsockname()[1]
            yield Client("127.0.0.1", port), printed.getvalue()
        finally:
            for server in started:
                server.should_exit = True
            done.result(60)


def test_serving_other_machines_prints_a_token_that_was_made(run, cache, monkeypatch) -> None:
    options = [run, "--host", "0.0.0.0", "--cache", cache]  # noqa: S104
    with command(monkeypatch, *options) as (client, printed):
        address = re.search(r"http://0\.0\.0\.0:(\d+)/#token=(\S+)", printed)
        assert address is not None
        assert int(address[1]) == client.port
        for token, status in ((address[2], 200), (TOKEN, 401)):
            bearer = {"Authorization": f"Bearer {token}"}
            assert client.ask("GET", "/api/about", headers=bearer).status == status


def test_the_token_of_a_file_opens_the_service_and_is_not_printed(
    run, cache, tmp_path, monkeypatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    options = [run, "--token-file", tmp_path / "token", "--cache", cache]
    with command(monkeypatch, *options) as (client, printed):
        assert f"http://127.0.0.1:{client.port}/ " in printed
        assert TOKEN not in printed
        assert client.ask("GET", "/api/about", headers=BEARER).status == 200
        assert client.ask("GET", "/api/about").status == 401
