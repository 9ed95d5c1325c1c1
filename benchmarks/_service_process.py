"""A service in a process of its own, a probe of its health and memory, and a client of bare HTTP.

The probe is a process, too, so that a busy benchmark does not delay it. On a busy machine every
round trip is late now and then; the probe therefore asks a second server, which does nothing, at
the same rate. The difference is the service's own.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 1800.0
"""Most seconds until a service answers; a library of a million images is read first."""

PROBE_SECONDS = 0.1
HEALTH_MS = 100.0
"""Most milliseconds of a health check."""

FEW_SAMPLES = 30
"""Growth of memory is not told from fewer samples."""


class Service:
    """`counterfoil serve` with some arguments; ``restart`` keeps the port."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.arguments, self.log = list(arguments), folder / "service.log"
        self.pid_file = folder / "service.pid"
        self.port, self.start_seconds = 0, 0.0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [sys.executable, "-m", "counterfoil", "serve", *self.arguments]
        command += ["--port", str(self.port)]
        started, before = time.perf_counter(), self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid_file.write_text(str(self.process.pid))
        while time.perf_counter() - started < START_SECONDS:
            text = self.log.read_bytes()[before:].decode("utf-8", "replace")
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", text):
                self.port = int(found[1])
                break
            if self.process.poll() is not None:
                sys.exit(f"the service ended with {self.process.returncode}:\n{text}")
            time.sleep(0.05)
        self.start_seconds = time.perf_counter() - started

    def stop(self) -> None:
        """SIGTERM; a service that has not ended after a minute is killed, which is a failure."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process = None

    def errors_logged(self) -> int:
        """Lines of the log that begin a traceback, or tell of a request that failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return sum("Traceback" in line or " failed" in line for line in lines)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Service]:
    folder.mkdir(parents=True, exist_ok=True)
    service = Service(folder, arguments)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@dataclass
class Health:
    """What a probe measured: milliseconds of health checks and of the control, memory in MiB.

    ``ran`` and ``waited`` are the seconds for which the thread of the event loop had a core, and
    for which it was ready but had none: on a busy machine, the latter explains late answers.
    """

    health_ms: list[float] = field(default_factory=list)
    control_ms: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    ran: float = 0.0
    waited: float = 0.0
    refused: int = 0
    starts: list[int] = field(default_factory=lambda: [0])

    def add(self, kind: str, value: float) -> None:
        if kind == "refused":  # a restart: what follows is another process
            self.refused += 1
            self.starts.append(len(self.memory))
        elif kind in ("ran", "waited"):
            setattr(self, kind, value)
        else:
            getattr(self, kind).append(value)

    @property
    def memory_growth(self) -> float:
        """From the first third to the last, at most, of the times between two restarts."""
        ends = [*self.starts[1:], len(self.memory)]
        parts = [self.memory[a:b] for a, b in zip(self.starts, ends, strict=True)]
        growths = [
            max(part[-(len(part) // 3) :]) - max(part[: len(part) // 3])
            for part in parts
            if len(part) >= FEW_SAMPLES
        ]
        return max(growths, default=0.0)

    def summary(self) -> dict[str, Any]:
        late = sum(value >= HEALTH_MS for value in self.health_ms)
        return {
            "health_checks": len(self.health_ms),
            "health_p50_ms": quantile(self.health_ms, 0.5),
            "health_p99_ms": quantile(self.health_ms, 0.99),
            "health_max_ms": max(self.health_ms, default=0.0),
            "health_late": late,
            "health_refused": self.refused,
            "control_p99_ms": quantile(self.control_ms, 0.99),
            "control_max_ms": max(self.control_ms, default=0.0),
            "control_late": sum(value >= HEALTH_MS for value in self.control_ms),
            "memory_mib": [min(self.memory, default=0.0), max(self.memory, default=0.0)],
            "memory_growth_mib": self.memory_growth,
            "loop_ran_s": self.ran,
            "loop_waited_s": self.waited,
        }


@contextmanager
def probed(service: Service) -> Iterator[Health]:
    """Filled when the block ends."""
    health = Health()
    command = [sys.executable, __file__, str(service.port), str(service.pid_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        probe.stdout.readline()  # it has begun
        try:
            yield health
        finally:
            probe.stdin.close()
            for line in probe.stdout:
                health.add(*json.loads(line))


async def probe_until_closed(port: int, pid_file: Path) -> None:
    """Ask both servers at a fixed rate until standard input is closed; then print all values."""
    control = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "control", stdout=asyncio.subprocess.PIPE
    )
    assert control.stdout is not None
    control_port = int(await control.stdout.readline())
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    clients = {"health_ms": Client(port), "control_ms": Client(control_port)}
    lines: list[tuple[str, float]] = []
    begun: tuple[str, float, float] | None = None
    print("begun", flush=True)
    while not ended.done():
        for kind, client in clients.items():
            started = time.perf_counter()
            try:
                answer = await client.ask("GET", "/healthz")
                assert answer.status == 200
                lines.append((kind, 1000 * (time.perf_counter() - started)))
            except (OSError, asyncio.IncompleteReadError):
                client.close()
                lines.append(("refused", 0.0))
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{pid_file.read_text()}/status").read_text().splitlines()
            used = next(line for line in status if line.startswith("RssAnon"))
            lines.append(("memory", int(used.split()[1]) / 1024))
            ran, waited, _ = Path(f"/proc/{pid_file.read_text()}/schedstat").read_text().split()
            now = pid_file.read_text(), int(ran) / 1e9, int(waited) / 1e9
            begun = begun if begun is not None and begun[0] == now[0] else now
        await asyncio.wait([ended], timeout=PROBE_SECONDS)
    control.terminate()
    await control.wait()
    if begun is not None:
        lines += [("ran", now[1] - begun[1]), ("waited", now[2] - begun[2])]
    print("\n".join(map(json.dumps, lines)))


async def answer_at_once() -> None:
    """The control: a server that answers every request with the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One kept connection that speaks just enough HTTP, and opens another if it was closed."""

    def __init__(self, port: int, seconds: float = 60.0) -> None:
        self.port, self.seconds = port, seconds
        self.reader: asyncio.StreamReader | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> Answer:
        return await asyncio.wait_for(self._ask(method, path, body, kind), self.seconds)

    async def _ask(self, method: str, path: str, body: bytes, kind: str) -> Answer:
        if self.reader is None or self.reader.at_eof():
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(request_bytes(method, path, body, kind))
        await self.writer.drain()
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.split("\r\n")
        pairs = (line.split(":", 1) for line in lines if ":" in line)
        headers = {name.lower(): value.strip() for name, value in pairs}
        content = await self.reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Answer(int(status.split()[1]), headers, content)

    def close(self) -> None:
        if self.reader is not None:
            self.writer.close()
        self.reader = None


def request_bytes(method: str, path: str, body: bytes, kind: str) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += f"Content-Type: {kind}\r\n\r\n" if kind else "\r\n"
    return head.encode() + body


@dataclass
class Tally:
    """Seconds and statuses of requests; ``failures`` are those that no client should see."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, what: str, answer: Answer, seconds: float) -> None:
        self.seconds.append(seconds)
        deliberate = answer.status == 503 and "retry-after" in answer.headers
        self.statuses["503 with Retry-After" if deliberate else str(answer.status)] += 1
        if answer.status >= 500 and not deliberate:
            self.failures.append(f"{what}: {answer.status} {answer.body[:200]!r}")

    def summary(self) -> dict[str, Any]:
        p50, p99 = quantile(self.seconds, 0.5), quantile(self.seconds, 0.99)
        return {
            "answers": sum(self.statuses.values()),
            "statuses": dict(sorted(self.statuses.items())),
            "failures": self.failures,
            "p50_ms": 1000 * p50,
            "p99_ms": 1000 * p99,
            "p99_to_p50": p99 / p50 if p50 else 0.0,
        }


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


if __name__ == "__main__":
    if sys.argv[1] == "control":
        asyncio.run(answer_at_once())
    else:
        asyncio.run(probe_until_closed(int(sys.argv[1]), Path(sys.argv[2])))
