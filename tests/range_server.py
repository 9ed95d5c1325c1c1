"""A web server on this machine that answers ranges of bytes, and fails when a test says so."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class RangeServer:
    """Files by name. ``requests`` lists (name, first byte, last byte) of every request."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off; those that have fewer are sent whole."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, if not 0."""
    down_after: int | None = None
    """Number of requests after which every answer is 503."""
    down: str = ""
    """Prefix of files that answer 503, if not empty, unless only their first byte is requested."""
    has_ranges: bool = True
    has_stamp: bool = True
    redirect: str = ""

    def sent(self, name: str = "") -> int:
        """Bytes requested of a file, or of all."""
        return sum(last - first + 1 for one, first, last in self.requests if name in ("", one))


@contextmanager
def range_server() -> Iterator[RangeServer]:
    state = RangeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            name = self.path.lstrip("/").partition("?")[0]
            down = state.down_after is not None and len(state.requests) >= state.down_after
            if state.down and name.startswith(state.down):
                down |= self.headers.get("Range") != "bytes=0-0"
            status = 503 if down else state.statuses.pop(0) if state.statuses else 0
            if state.redirect:
                self.send_response(302)
                self.send_header("Location", state.redirect)
                self.end_headers()
                return
            if status or name not in state.files:
                self._end(status or 404)
                return
            data = state.files[name]
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            first, last = (int(match[1]), int(match[2])) if match else (0, len(data) - 1)
            last = min(last, len(data) - 1)
            if first >= len(data):
                self._end(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            state.requests.append((name, first, last))
            body = data[first : last + 1]
            headers = {"ETag": f'"{sha256(data).hexdigest()[:16]}"'} if state.has_stamp else {}
            if state.has_ranges:
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            else:
                body = data
            cut = state.cuts.pop(0) if state.cuts else len(body)
            self._begin(206 if state.has_ranges else 200, len(body), headers)
            self.wfile.write(body[:cut])
            if cut < len(body):
                self.close_connection = True

        def _begin(self, status: int, size: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(size)}.items():
                self.send_header(key, value)
            self.end_headers()

        def _end(self, status: int, headers: dict[str, str] | None = None) -> None:
            self._begin(status, 0, headers or {})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
