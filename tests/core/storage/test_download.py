"""Downloads: whole or not at all, continued where they broke off, never more than was promised."""

from __future__ import annotations

import errno
import hashlib
import random

import pytest

from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage import download
from counterfoil.core.storage.download import DownloadError, fetch
from tests.core.storage.file_server import serving

DATA = random.Random(0).randbytes(1_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server():
    with serving({"a.bin": DATA}) as files:
        yield files


def get(server, folder, size: int = len(DATA), sha256: str = SHA256, path: str = "a.bin") -> None:
    fetch(f"{server.url}/{path}", folder / "a.bin", size, sha256, folder / "a.bin.part")


def test_a_file_is_downloaded_whole(server, tmp_path) -> None:
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert server.sent == len(DATA)


def test_an_interrupted_download_goes_on_where_it_broke_off(server, tmp_path) -> None:
    server.cuts = [300_000, 0, 0, 0]  # an answer that breaks off, and three that bring nothing
    with pytest.raises(DownloadError, match=r"a\.bin: "):
        get(server, tmp_path)
    assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin.part").stat().st_size == 300_000
    server.requests.clear()
    server.sent = 0
    get(server, tmp_path)
    assert server.requests == [("/a.bin", "bytes=300000-")]
    assert server.sent == len(DATA) - 300_000
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_connection_that_breaks_off_is_opened_again(server, tmp_path) -> None:
    server.cuts = [300_000, 0, 200_000]
    get(server, tmp_path)
    command = [header for _, header in server.requests]
    assert command == [None, "bytes=300000-", "bytes=300000-", "bytes=500000-"]
    assert server.sent == len(DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_server_without_ranges_begins_anew(server, tmp_path) -> None:
    server.ranges = False
    server.cuts = [300_000]
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert server.sent == len(DATA) + 300_000


def test_a_server_that_never_sends_a_whole_file_is_given_up(server, tmp_path) -> None:
    server.ranges = False
    server.cuts = [300_000, 200_000] * 100
    with pytest.raises(DownloadError, match=r"a\.bin: "):
        get(server, tmp_path)
    assert len(server.requests) <= download.CONNECTIONS


def test_another_file_is_refused_named_and_deleted(server, tmp_path) -> None:
    server.files["a.bin"] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    with pytest.raises(CheckpointError, match=r"a\.bin: refused and deleted, it is not the file"):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_an_older_version_is_thrown_away(server, tmp_path) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == DATA


@pytest.mark.parametrize("size", [len(DATA), len(DATA) + 1])
def test_a_part_of_the_whole_size_or_more_is_checked_as_well(server, tmp_path, size) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"x" * size)
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_no_more_is_read_than_the_registry_says(server, tmp_path) -> None:
    with pytest.raises(DownloadError, match=r"a\.bin: larger than the 1,000 bytes"):
        get(server, tmp_path, size=1000)
    assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin.part").stat().st_size <= 1000


def test_a_file_that_is_shorter_than_the_registry_says_is_given_up(server, tmp_path) -> None:
    with pytest.raises(DownloadError, match=r"a\.bin: "):
        get(server, tmp_path, size=len(DATA) + 5)
    assert not (tmp_path / "a.bin").exists()


def test_a_missing_file_is_named(server, tmp_path) -> None:
    with pytest.raises(DownloadError, match=r"b\.bin: 404"):
        get(server, tmp_path, path="b.bin")


def test_a_redirect_is_followed_if_it_is_safe(server, tmp_path) -> None:
    server.redirects["/b.bin"] = f"{server.url}/a.bin"
    get(server, tmp_path, path="b.bin")
    assert (tmp_path / "a.bin").read_bytes() == DATA


@pytest.mark.parametrize(
    "address",
    ["file:///etc/passwd", "ftp://127.0.0.1/a", "http://example.org/a", "http://[bad/a", "a.bin"],
)
def test_only_https_is_spoken_and_redirects_keep_to_it(server, tmp_path, address) -> None:
    with pytest.raises(DownloadError, match=r"only downloaded over https|not an address"):
        fetch(address, tmp_path / "a.bin", len(DATA), SHA256, tmp_path / "a.bin.part")
    if "://" in address and "[" not in address:
        server.redirects["/a.bin"] = address
        with pytest.raises(DownloadError, match=r"only downloaded over https|\b302\b"):
            get(server, tmp_path)
    assert not (tmp_path / "a.bin").exists()


def test_without_a_network_the_reason_is_told(tmp_path) -> None:
    with serving({}) as gone:
        pass
    with pytest.raises(DownloadError, match=r"a\.bin: Connection refused"):
        get(gone, tmp_path)


def test_a_full_disk_is_told_before_and_while_writing(server, tmp_path, monkeypatch) -> None:
    free = download.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda path: free._replace(free=1000))
        with pytest.raises(CheckpointError, match=r"a\.bin\.part: the disk is full .* 1\.0 MB"):
            get(server, tmp_path)
    assert server.requests == []

    def full(*_: object):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr(download, "_append", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        get(server, tmp_path)
