"""Who may ask: other sites in a browser, other names, and the token for other machines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from counterfoil.app.access import Access
from counterfoil.app.service import create_app
from counterfoil.app.serving import make_server
from counterfoil.errors import ConfigError
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


def test_a_service_for_other_machines_is_not_made_without_a_token(content, run, tmp_path) -> None:
    with pytest.raises(ConfigError, match="no token"):
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


def test_serving_other_machines_prints_a_token_that_was_made(run, cache) -> None:
    command = [sys.executable, "-m", "counterfoil", "serve", run, "--host", "0.0.0.0"]  # noqa: S104
    command += ["--port", "0", "--cache", cache]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        found = re.search(r"http://0\.0\.0\.0:(\d+)/#token=(\S+)", line)
        assert found is not None
        for token, status in ((found[2], 200), (TOKEN, 401)):
            request = urllib.request.Request(
                f"http://127.0.0.1:{found[1]}/api/about",
                headers={"Authorization": f"Bearer {token}"},
            )
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
                    assert answer.status == status
            except urllib.error.HTTPError as error:
                assert error.code == status  # noqa: PT017
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()
        process.stdout.close()
