"""Remote files: ranges of bytes, repeated where a connection breaks, never more than requested."""

from __future__ import annotations

import os
import pickle

import pytest

from counterfoil.core.errors import ConfigError, DataError, MissingExtraError, RemoteError
from counterfoil.core.storage import remote
from counterfoil.core.storage.remote import RemoteFile, check_url, expand_braces, is_url, safe_url
from tests.range_server import RangeServer, range_server

DATA = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    with range_server() as running:
        running.files["a.tar"] = DATA
        yield running


def test_a_range_is_read_without_the_rest_of_the_file(server: RangeServer) -> None:
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    assert (file.size, file.name) == (len(DATA), "a.tar")
    assert file.stamp
    assert file.read(100, 50) == DATA[100:150]
    assert server.sent() == 1 + 50
    assert file.read(len(DATA) - 3, 3) == DATA[-3:]
    with pytest.raises(DataError, match="ends at byte 10240"):
        file.read(len(DATA) - 3, 4)


def test_reading_in_order_fetches_ahead_and_reading_at_random_does_not(
    server: RangeServer, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "READ_AHEAD", 4000)
    monkeypatch.setattr(remote, "MAX_GAP", 100)
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    assert b"".join(file.read(start, 64) for start in range(0, 6400, 64)) == DATA[:6400]
    assert len(server.requests) == 1 + 1 + 2
    server.requests.clear()
    for start in (9000, 100, 5000):
        assert file.read(start, 64) == DATA[start : start + 64]
    assert server.sent() == 3 * 64


def test_a_connection_that_breaks_off_is_continued_where_it_stopped(server: RangeServer) -> None:
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    server.requests.clear()
    server.cuts += [1000, 0, 500]
    assert file.read(0, 5000) == DATA[:5000]
    assert [(first, last) for _, first, last in server.requests] == [
        (0, 4999),
        (1000, 4999),
        (1000, 4999),
        (1500, 4999),
    ]


def test_a_server_that_fails_for_a_while_is_asked_again(server: RangeServer) -> None:
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    server.statuses += [503, 429, 500]
    assert file.read(10, 10) == DATA[10:20]
    server.statuses += [502]
    assert RemoteFile.open_url(f"{server.url}/a.tar").size == len(DATA)


def test_a_server_that_keeps_failing_is_a_remote_error(server: RangeServer) -> None:
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    server.down_after = 0
    with pytest.raises(RemoteError, match=r"a\.tar: cannot be read after 5 attempts \(503"):
        file.read(0, 10)
    with pytest.raises(RemoteError, match="cannot be read after 5 attempts"):
        RemoteFile.open_url("http://127.0.0.1:9/a.tar")
    server.down_after, server.cuts = None, [0] * 5
    with pytest.raises(RemoteError):
        file.read(0, 10)


@pytest.mark.parametrize(
    ("status", "message"), [(404, "no such file"), (403, "refused"), (410, "no such")]
)
def test_a_file_that_is_not_there_is_an_error_at_once(
    server: RangeServer, status: int, message: str
) -> None:
    server.statuses = [status]
    with pytest.raises(DataError, match=rf"a\.tar: .*{message}.*{status}"):
        RemoteFile.open_url(f"{server.url}/a.tar?signature=secret")


def test_a_server_without_ranges_is_refused(server: RangeServer) -> None:
    server.has_ranges = False
    with pytest.raises(DataError, match="does not answer range requests"):
        RemoteFile.open_url(f"{server.url}/a.tar")


def test_a_file_that_changed_meanwhile_is_refused(server: RangeServer) -> None:
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    server.files["a.tar"] = DATA[::-1]
    with pytest.raises(RemoteError, match="was changed while it was read"):
        file.read(0, 10)
    server.files["a.tar"] = b"short"
    with pytest.raises(RemoteError, match="changed"):
        file.read(100, 10)


@pytest.mark.parametrize("status", [401, 403, 404, 416])
def test_a_file_that_is_refused_midway_is_no_unreadable_image(
    server: RangeServer, status: int
) -> None:
    """Readers leave out an image with a `DataError`; this must end their work."""
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    server.statuses = [status]
    with pytest.raises(RemoteError, match=r"a\.tar: "):
        file.read(0, 10)
    assert file.read(0, 10) == DATA[:10]


def test_a_file_that_changed_meanwhile_is_refused_through_fsspec(tmp_path) -> None:
    pytest.importorskip("fsspec")
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    file = RemoteFile.open_url(f"file://{path}")
    path.write_bytes(DATA[::-1])
    os.utime(path, (1, 1))
    with pytest.raises(RemoteError, match=r"a\.tar: was changed while it was read; start again"):
        file.read(0, 10)


@pytest.mark.parametrize(
    ("name", "sent"),
    [("a b.tar", "a%20b.tar"), ("tüte.tar", "t%C3%BCte.tar"), ("a%20b.tar", "a%20b.tar")],
)
def test_an_address_may_have_spaces_and_any_letters(
    server: RangeServer, name: str, sent: str
) -> None:
    server.files[sent] = DATA
    assert RemoteFile.open_url(f"{server.url}/{name}").read(7, 5) == DATA[7:12]


def test_an_empty_file_has_no_bytes(server: RangeServer) -> None:
    server.files["empty.tar"] = b""
    assert RemoteFile.open_url(f"{server.url}/empty.tar").size == 0


def test_a_redirect_stays_on_the_web(server: RangeServer) -> None:
    for target in ("file:///etc/passwd", "ftp://host/a.tar"):
        server.redirect = target
        with pytest.raises(DataError, match=r"redirects to .* refused"):
            RemoteFile.open_url(f"{server.url}/a.tar")


def test_a_stream_refuses_a_read_that_only_a_hostile_header_asks_for(server: RangeServer) -> None:
    file = RemoteFile(f"{server.url}/a.tar", 1 << 50, "")
    with file.open() as stream, pytest.raises(ValueError, match="at once"):
        stream.read(1 << 40)


def test_memory_and_local_file_systems_are_read_through_fsspec(tmp_path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/bucket/a.tar", DATA)
    (tmp_path / "a.tar").write_bytes(DATA)
    for url in ("memory://bucket/a.tar", f"file://{tmp_path}/a.tar"):
        file = RemoteFile.open_url(url)
        assert (file.size, file.name, file.read(500, 20)) == (len(DATA), "a.tar", DATA[500:520])
        assert pickle.loads(pickle.dumps(file)).read(0, 5) == DATA[:5]  # noqa: S301
    with pytest.raises(DataError, match=r"memory://bucket/b\.tar: no such file"):
        RemoteFile.open_url("memory://bucket/b.tar")


def test_without_fsspec_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"counterfoil\[remote\]"):
        RemoteFile.open_url("memory://bucket/a.tar")


def test_an_address_is_told_from_a_path() -> None:
    assert is_url("http://host/a.tar")
    assert is_url("s3://bucket/a.tar")
    for path in ("data/a.tar", "C:\\data", "/data/x", "scenes"):
        assert not is_url(path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("simplecache::http://host/a.tar", "chained"),
        ("zip://a::http://host/b.zip", "chained"),
        ("gopher://host/a.tar", "unknown kind of address 'gopher://'"),
        ("https://me:secret@host/a.tar", "a password in the address"),
        ("http://[::1/a.tar", "not an address"),
    ],
)
def test_an_address_that_is_not_read_is_refused_without_its_secret(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_url(url)
    assert "secret" not in str(error.value)


def test_messages_hide_passwords_and_signatures() -> None:
    assert safe_url("https://me:pw@host/a.tar?sig=1") == "https://host/a.tar"


def test_braces_name_files_in_order() -> None:
    assert expand_braces("s3://b/x.tar") == ["s3://b/x.tar"]
    assert expand_braces("u://{08..11}") == ["u://08", "u://09", "u://10", "u://11"]
    assert expand_braces("u://{a,b}-{0..1}") == ["u://a-0", "u://a-1", "u://b-0", "u://b-1"]
    assert expand_braces("u://{t-{0..1},d}.tar") == ["u://t-0.tar", "u://t-1.tar", "u://d.tar"]
    for wrong in ("u://{0..", "u://{a}", "u://{9..0}", "u://*.tar", "u://{0..999999999}"):
        with pytest.raises(ConfigError, match="u://"):
            expand_braces(wrong)
    with pytest.raises(ConfigError, match="more than"):
        expand_braces("u://" + "{0..9}" * 6)


def test_hostile_braces_are_refused_before_they_fill_the_memory(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="more than 100 braces"):
        expand_braces("u://" + "{" * 4000)
    assert len(expand_braces("u://" + "{0..0}" * 100)) == 1
    monkeypatch.setattr(remote, "MAX_FILES", 50)
    ranges = []
    numbers = remote._numbers
    monkeypatch.setattr(remote, "_numbers", lambda *args: ranges.append(1) or numbers(*args))
    with pytest.raises(ConfigError, match="more than 50 files"):
        expand_braces("u://{" + ",".join(["{0..29}"] * 90) + "}")
    assert len(ranges) == 2  # the other 88 were not expanded


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_reads_too(server: RangeServer) -> None:
    file = RemoteFile.open_url(f"{server.url}/a.tar")
    with remote._windows.lock:  # as if another thread were reading
        child = os.fork()
        if child == 0:
            os._exit(0 if file.read(5, 5) == DATA[5:10] else 1)
    assert os.waitpid(child, 0)[1] == 0
