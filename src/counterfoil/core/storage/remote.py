"""Files in object storage or on a web server, read by byte range and never copied to the disk.

HTTP and HTTPS need no package; other addresses (``s3://``, ``gs://``, ``memory://`` …) go through
`fsspec`. A server is not trusted: it cannot make a reader take more bytes than were requested, and
a file that changes while it is read is refused. A read that breaks off is repeated from where it
stopped; `RemoteError` is raised only after several attempts without a new byte.
"""

from __future__ import annotations

import http.client
import importlib
import io
import itertools
import os
import re
import string
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, cast
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from counterfoil.core.errors import ConfigError, DataError, MissingExtraError, RemoteError
from counterfoil.core.storage.reading import KIB, LINE_BYTES, MIB

HTTP_SCHEMES = ("http", "https")
FSSPEC_SCHEMES = (
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oss", "oci", "webhdfs", "hdfs",
    "ftp", "sftp", "ssh", "file", "memory",
)  # fmt: skip

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
"""Connections in a row that may break off without a new byte."""

CONNECTIONS = 50
"""Connections per read; a server that sends a byte per connection is given up."""

PAUSE_SECONDS = 0.5
"""Pause before the second attempt; it doubles before each further one."""

READ_AHEAD = 4 * MIB
"""Bytes fetched at once while a file is read in order."""

MAX_GAP = 512 * KIB
"""Bytes that may be skipped between two reads that count as reading in order."""

MAX_WINDOWS = 8
"""Files whose last bytes fetched stay in memory."""

MAX_FILES = 100_000
"""Files that one address may name."""

MAX_BRACES = 100
"""Pairs of braces in one address."""

MAX_ADDRESS = 10_000

_CHUNK = MIB // 4
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)")
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})", re.ASCII)
_GONE = {401: "not authorized", 403: "access is refused", 404: "no such file", 410: "no such file"}
_RANGE_REFUSED = 416


def is_url(source: object) -> bool:
    """Whether a data set is named by an address instead of a path."""
    return isinstance(source, str) and _ADDRESS.match(source) is not None


def check_url(url: str) -> None:
    """Refuse an address that cannot be read, without connecting."""
    match = _ADDRESS.match(url)
    scheme = match[1].lower() if match else ""
    chained = scheme not in HTTP_SCHEMES and "::" in url  # elsewhere it may be an IPv6 address
    if match is None or chained:
        raise ConfigError(
            f"{safe_url(url)}: chained addresses are not read; name the files directly"
        )
    if scheme not in (*HTTP_SCHEMES, *FSSPEC_SCHEMES):
        known = ", ".join((*HTTP_SCHEMES, *FSSPEC_SCHEMES))
        raise ConfigError(
            f"{safe_url(url)}: unknown kind of address '{scheme}://' (known: {known})"
        )
    try:
        secret = urlsplit(url).password
    except ValueError:
        raise ConfigError(f"{safe_url(url)}: not an address") from None
    if secret is not None:
        raise ConfigError(
            f"{safe_url(url)}: a password in the address would be saved with the run; use the "
            "environment or the configuration file of your storage"
        )


def safe_url(url: str) -> str:
    """An address for messages, without password and query, which may hold a signature."""
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("/")
    address = f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"
    return address if len(address) <= 300 else f"{address[:300]}…"


def expand_braces(url: str) -> list[str]:
    """The addresses that braces name, in order.

    >>> expand_braces("s3://b/{train-{00..02},dev}.tar")[1:]
    ['s3://b/train-01.tar', 's3://b/train-02.tar', 's3://b/dev.tar']
    """
    if "*" in url:
        raise ConfigError(f"{safe_url(url)}: '*' is not expanded; use braces, as in {{000..009}}")
    if len(url) > MAX_ADDRESS:
        raise ConfigError(f"{safe_url(url)}: an address of more than {MAX_ADDRESS:,} characters")
    if url.count("{") > MAX_BRACES:
        raise ConfigError(f"{safe_url(url)}: more than {MAX_BRACES} braces")
    return _expanded(url, url)


def _expanded(text: str, url: str) -> list[str]:
    start = text.find("{")
    if start < 0:
        return [text]
    depth, commas, end = 0, [start], -1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if text[index] == "," and depth == 1:
            commas.append(index)
        if depth == 0:
            end = index
            break
    if end < 0:
        raise ConfigError(f"{safe_url(url)}: a brace is not closed")
    options = [text[i + 1 : j] for i, j in itertools.pairwise([*commas, end])]
    if len(options) == 1:
        middles = _numbers(options[0], url)
    else:
        middles = []
        for option in options:
            middles += _expanded(option, url)
            _check_count(len(middles), url)
    ends = _expanded(text[end + 1 :], url)
    _check_count(len(middles) * len(ends), url)
    return [f"{text[:start]}{middle}{rest}" for middle in middles for rest in ends]


def _check_count(count: int, url: str) -> None:
    if count > MAX_FILES:
        raise ConfigError(f"{safe_url(url)}: names more than {MAX_FILES:,} files")


def _numbers(text: str, url: str) -> list[str]:
    """``000..009`` as ten names with leading zeros."""
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"{safe_url(url)}: {{{text[:40]}}} is neither {{000..009}} nor {{a,b}}")
    first, last = int(match[1]), int(match[2])
    _check_count(last - first + 1, url)
    return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]


class RemoteFile:
    """A file at an address: its size, and a ``stamp`` that changes when its content does.

    ``buffered`` has byte ranges, by offset, that a stream has fetched ahead. Picklable; the ranges
    are not. An empty stamp means that the server gives none.
    """

    def __init__(self, url: str, size: int, stamp: str) -> None:
        self.url, self.size, self.stamp = url, size, stamp
        self.buffered: dict[int, bytes] = {}

    @classmethod
    def open_url(cls, url: str) -> RemoteFile:
        """Ask the server for the size of a file; `DataError` if there is none."""
        check_url(url)
        problem: Exception | None = None
        for attempt in range(ATTEMPTS):
            _pause(attempt)
            try:
                return cls(url, *_transport(url).status(url))
            except _TEMPORARY as error:
                problem = error
        raise _unreachable(url, problem)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "size": self.size, "stamp": self.stamp, "buffered": {}}

    def __str__(self) -> str:
        return safe_url(self.url)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return unquote(urlsplit(self.url).path.rstrip("/").rpartition("/")[2]) or str(self)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file, all of them; `DataError` beyond its end, `RemoteError` if it fails."""
        data = self.buffered.get(offset)
        if data is not None and len(data) >= size:
            return data[:size]
        return _windows.read(self, offset, size)

    def fetch(self, offset: int, size: int) -> bytes:
        """`read` from the server, whatever is in memory."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise DataError(f"{self}: ends at byte {self.size}, before byte {offset + size}")
        data, failures, problem = bytearray(), 0, None
        for _ in range(CONNECTIONS):
            if len(data) == size or failures == ATTEMPTS:
                break
            _pause(failures)
            before = len(data)
            try:
                for piece in _transport(self.url).stream(self, offset + before, offset + size):
                    data += piece[: size - len(data)]
                    if len(data) == size:
                        break
            except _TEMPORARY as error:
                problem = error
            except DataError as error:
                # the whole file fails: a reader must not take it for one unreadable image
                raise RemoteError(str(error)) from None
            failures = 0 if len(data) > before else failures + 1
        if len(data) < size:
            raise _unreachable(self.url, problem)
        return bytes(data)

    def open(self) -> BinaryIO:
        """The file as a stream that can seek, for reading an archive's headers."""
        return cast(BinaryIO, _RemoteStream(self))


class _RemoteStream(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self.file, self.position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.size}[whence]
        self.position = max(0, start + offset)
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.file.size - self.position)
        size = left if size < 0 else min(size, left)
        if size > LINE_BYTES:  # such as the claimed size of a long name in a tar header
            raise ValueError(f"{size} bytes at once, at most {LINE_BYTES} are read")
        data = self.file.read(self.position, size) if size else b""
        self.position += len(data)
        return data


class _Windows:
    """The last bytes fetched of a few files, larger while a file is read in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.windows: OrderedDict[RemoteFile, tuple[int, bytes]] = OrderedDict()

    def read(self, file: RemoteFile, offset: int, size: int) -> bytes:
        with self.lock:
            start, data = self.windows.get(file, (0, b""))
        end = start + len(data)
        if start <= offset and offset + size <= end:
            return data[offset - start : offset - start + size]
        in_order = bool(data) and start <= offset <= end + MAX_GAP
        wanted = max(size, READ_AHEAD) if in_order else size
        wanted = max(size, min(wanted, file.size - offset))
        data = file.fetch(offset, wanted)
        if wanted <= READ_AHEAD:
            with self.lock:
                self.windows[file] = (offset, data)
                self.windows.move_to_end(file)
                while len(self.windows) > MAX_WINDOWS:
                    self.windows.popitem(last=False)
        return data[:size]


_windows = _Windows()


def _renew() -> None:
    """A forked process must not inherit a lock that another thread held."""
    global _windows
    _windows = _Windows()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _TemporaryError(Exception):
    """A failure that another attempt may not have."""


_TEMPORARY = (_TemporaryError, OSError, http.client.HTTPException, EOFError)


def _pause(failures: int) -> None:
    if failures:
        time.sleep(PAUSE_SECONDS * 2 ** (failures - 1))


def _unreachable(url: str, problem: Exception | None) -> RemoteError:
    reason = problem.reason if isinstance(problem, URLError) else problem
    text = getattr(reason, "strerror", None) or str(reason or "the server sent too few bytes")
    return RemoteError(
        f"{safe_url(url)}: cannot be read after {ATTEMPTS} attempts "
        f"({' '.join(str(text).split())[:200] or type(reason).__name__})"
    )


class _Http:
    """HTTP and HTTPS by ranges of bytes."""

    def status(self, url: str) -> tuple[int, str]:
        """Size and stamp of a file. A range of one byte, as some servers refuse HEAD."""
        try:
            with self._request(url, "bytes=0-0") as answer:
                _, _, size = _content_range(url, answer)
                return size, _http_stamp(answer)
        except HTTPError as error:
            if error.code == _RANGE_REFUSED and error.headers.get("Content-Range") == "bytes */0":
                return 0, ""
            raise _refusal(url, error) from None

    def stream(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        try:
            answer = self._request(file.url, f"bytes={start}-{end - 1}")
        except HTTPError as error:
            raise _refusal(file.url, error) from None
        with answer:
            first, _, size = _content_range(file.url, answer)
            if size != file.size or _http_stamp(answer) != file.stamp:
                raise _changed(file)
            if first != start:
                raise DataError(f"{file}: the server sent another range than requested")
            while piece := answer.read(min(_CHUNK, end - start)):
                yield piece

    def _request(self, url: str, span: str) -> Any:
        headers = {"Accept-Encoding": "identity", "User-Agent": "counterfoil", "Range": span}
        address = quote(url, safe=string.punctuation)  # spaces and letters beyond ASCII alone
        request = Request(address, headers=headers)  # noqa: S310 - the scheme was checked
        return build_opener(_Redirects).open(request, timeout=TIMEOUT_SECONDS)


class _Redirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme != "https" and not (scheme == "http" and req.type == "http"):
            raise DataError(
                f"{safe_url(req.full_url)}: redirects to '{scheme}://', which is refused"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _refusal(url: str, error: HTTPError) -> Exception:
    if 300 <= error.code < 400:
        return DataError(f"{safe_url(url)}: redirects to an address that is refused ({error.code})")
    if error.code in _GONE:
        return DataError(f"{safe_url(url)}: {_GONE[error.code]} ({error.code})")
    if error.code == _RANGE_REFUSED:
        return DataError(f"{safe_url(url)}: shorter than before; was it changed meanwhile?")
    return _TemporaryError(f"{error.code} {error.reason}")


def _changed(file: RemoteFile) -> DataError:
    return DataError(f"{file}: was changed while it was read; start again")


def _content_range(url: str, answer: Any) -> tuple[int, int, int]:
    """First and last byte of an answer, and the size of the file."""
    value = answer.headers.get("Content-Range") or ""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", value, re.ASCII)
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT or match is None:
        raise DataError(
            f"{safe_url(url)}: the server does not answer range requests, which shards need"
        )
    return int(match[1]), int(match[2]), int(match[3])


def _http_stamp(answer: Any) -> str:
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")[:200]


class _Fsspec:
    """All other addresses, by the file system that `fsspec` has for them."""

    def status(self, url: str) -> tuple[int, str]:
        system, path = self._system(url)
        info = self._call(url, lambda: system.info(path))
        size = info.get("size")
        if info.get("type") == "directory" or type(size) is not int:
            raise DataError(f"{safe_url(url)}: not a file of known size")
        keys = ("ETag", "etag", "LastModified", "last_modified", "mtime", "created")
        stamp = next((str(info[key]) for key in keys if info.get(key)), "")
        return size, stamp[:200]

    def stream(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        if self.status(file.url) != (file.size, file.stamp):
            raise _changed(file)
        system, path = self._system(file.url)
        yield self._call(file.url, lambda: system.cat_file(path, start=start, end=end))

    def _system(self, url: str) -> tuple[Any, str]:
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError:
            raise MissingExtraError("fsspec", "remote", f"reading {safe_url(url)}") from None
        try:
            return fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            scheme = url.partition(":")[0]
            raise ConfigError(
                f"{safe_url(url)}: fsspec cannot read '{scheme}://' here ({error})"
            ) from None

    def _call(self, url: str, action: Any) -> Any:
        try:
            return action()
        except FileNotFoundError:
            raise DataError(f"{safe_url(url)}: no such file") from None
        except PermissionError as error:
            raise DataError(f"{safe_url(url)}: access is refused ({error})") from None
        except _TEMPORARY:
            raise
        except Exception as error:  # each storage has its own errors
            raise _TemporaryError(f"{type(error).__name__}: {error}") from None


def _transport(url: str) -> _Http | _Fsspec:
    return _Http() if url.partition(":")[0].lower() in HTTP_SCHEMES else _Fsspec()
