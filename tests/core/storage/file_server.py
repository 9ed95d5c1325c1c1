"""A server of files for tests: with or without ranges, cut off, redirected, or larger than said."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Files:
    """What is served, how, and what was asked for and sent."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off."""
    redirects: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Files]:
    """Serve files on a free port of this machine until the end of the block."""
    state = Files(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            command = self.headers.get("Range")
            state.requests.append((self.path, command))
            if self.path in state.redirects:
                self.send_response(302)
                self.send_header("Location", state.redirects[self.path])
                self.end_headers()
                return
            data = state.files.get(self.path.lstrip("/"))
            if data is None:
                self.send_error(404)
                return
            start = (
                int(re.fullmatch(r"bytes=(\d+)-", command)[1]) if command and state.ranges else 0
            )
            if start and start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            body = data[start:][: state.cuts.pop(0) if state.cuts else None]
            state.sent += len(body)
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
