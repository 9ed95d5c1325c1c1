"""Download a file of known size and SHA-256: resumed where it broke off, never more than its size.

Only HTTPS is spoken, and HTTP with this machine. Redirects are held to the same rule.
"""

from __future__ import annotations

import errno
import http.client
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from counterfoil.core.errors import CheckpointError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import put_in_place, sync_file
from counterfoil.core.storage.reading import MIB, digest_of

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 3
"""Connections in a row that may break off without a new byte."""

CONNECTIONS = 50
"""Connections per file: without ranges, each begins at the first byte."""

_CHUNK = MIB // 4
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOCAL = {"localhost", "127.0.0.1", "::1"}
_HTTP_RANGE_REFUSED = 416


class DownloadError(CheckpointError):
    """A file that could not be fetched: no network, no such file, a broken connection."""


def fetch(
    url: str, target: Path, size: int, sha256: str, part: Path, progress: Progress | None = None
) -> None:
    """Download ``url`` to ``target``; ``part`` keeps what was received until it is whole.

    A file of another SHA-256 is refused and deleted. The caller makes sure that no other process
    writes the same files.
    """
    resumed = _received(part, size) > 0
    _receive(url, part, size, progress or Silent())
    if resumed and digest_of(part) != sha256:  # the part was of another version of the file
        part.unlink()
        _receive(url, part, size, progress or Silent())
    digest = digest_of(part)
    if digest != sha256:
        part.unlink()
        raise CheckpointError(
            f"{url}: refused and deleted, it is not the file of the registry (SHA-256 "
            f"{digest[:16]}…, expected {sha256[:16]}…); a newer version of this package may list it"
        )
    sync_file(part)
    put_in_place(part, target)


def _received(part: Path, size: int) -> int:
    """Bytes of an earlier download; a part that is larger than the file is deleted."""
    received = part.stat().st_size if part.is_file() else 0
    if received > size:
        part.unlink()
        return 0
    return received


def _receive(url: str, part: Path, size: int, progress: Progress) -> None:
    """Append to ``part`` until it has ``size`` bytes, over as many connections as that needs."""
    failures, received = 0, _received(part, size)
    _check_space(part, size - received)
    part.touch()
    problem: Exception | None = None
    for _ in range(CONNECTIONS):
        if received == size or failures == ATTEMPTS:
            break
        try:
            chunks, total = _append(url, part, received, size), -(-(size - received) // _CHUNK)
            for _ in progress.track(chunks, f"downloading {part.stem}", total):
                pass
        except HTTPError as error:
            raise DownloadError(f"{url}: {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in _DISK_FULL:
                raise _disk_full(part, size) from None
            problem = error
        before, received = received, _received(part, size)
        failures = 0 if received > before else failures + 1
    if received < size:
        reason = _reason(problem) if problem else "the server sent less than the whole file"
        raise DownloadError(f"{url}: {reason}") from None


def _append(url: str, part: Path, start: int, size: int) -> Iterator[int]:
    """Write what the server sends from byte ``start`` on; yields the sizes of the pieces."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "counterfoil"}
    if start:
        headers["Range"] = f"bytes={start}-"
    _check_address(url)
    request = Request(url, headers=headers)  # noqa: S310 - the scheme was checked
    try:
        answer = build_opener(_Redirects).open(request, timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if error.code != _HTTP_RANGE_REFUSED or not start:
            raise
        part.write_bytes(b"")  # the server's file is shorter than the part: start anew
        return
    with answer, part.open("r+b") as file:
        # 200 instead of 206: a server without ranges sends the file from its beginning
        offset = start if start and answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0
        if offset and not _starts_at(answer.headers.get("Content-Range"), start, size):
            raise DownloadError(f"{url}: the server sent another part of the file than asked for")
        file.seek(offset)
        file.truncate()
        while chunk := answer.read(min(_CHUNK, size - offset + 1)):
            offset += len(chunk)
            if offset > size:
                file.seek(0)
                file.truncate()
                raise DownloadError(f"{url}: larger than the {size:,} bytes of the registry")
            file.write(chunk)
            yield len(chunk)


def _starts_at(content_range: str | None, start: int, size: int) -> bool:
    parts = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range or "")
    return parts is not None and int(parts[1]) == start and parts[2] in ("*", str(size))


class _Redirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        _check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        local = parts.hostname in _LOCAL
    except ValueError:
        raise DownloadError(f"{url}: not an address") from None
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise DownloadError(f"{url}: refused, files are only downloaded over https")


def _check_space(part: Path, missing: int) -> None:
    if shutil.disk_usage(part.parent).free < missing:
        raise _disk_full(part, missing)


def _disk_full(part: Path, size: int) -> CheckpointError:
    return CheckpointError(
        f"{part}: the disk is full (or a quota is reached), {size / MIB:.1f} MB are needed; free "
        "some space, or choose another folder with --cache, and run it again"
    )


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return " ".join(str(reason).split())[:200] or type(reason).__name__
