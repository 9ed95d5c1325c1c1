"""The parts of `service_faults.py`: each attacks a running service and returns its row."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from _service_process import Client, Service, Tally, probed, request_bytes
from PIL import Image

EDGE = "edge-of-a-part"
EXTREMES = (b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00")
FILE_TYPES = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO")
CLIENTS = 50
"""Clients of the load test."""


@dataclass(frozen=True)
class Sizes:
    """How much each part does."""

    uploads: int = 400
    examples: int = 15
    slow_clients: int = 60
    slow_seconds: float = 15.0
    gone: int = 300
    load_seconds: float = 30.0
    library: int = 20_000
    library_searches: int = 100
    runs: int = 100
    run_reads: int = 100


def form(data: bytes, name: str = "photo", field: str = "file") -> tuple[bytes, str]:
    """The body and type of an upload."""
    head = f'--{EDGE}\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'
    body = head.encode() + data + f"\r\n--{EDGE}--\r\n".encode()
    return body, f"multipart/form-data; boundary={EDGE}"


def seeds() -> list[bytes]:
    """Whole files of every type, two sizes each."""
    rng, files = np.random.default_rng(0), []
    for side in (24, 90):
        picture = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        for kind in FILE_TYPES:
            buffer = io.BytesIO()
            picture.save(buffer, kind)
            files.append(buffer.getvalue())
    return files


def mutated(files: list[bytes], rng: random.Random) -> bytes:
    """A file with up to four faults: flipped bits, cuts, repeats, splices, extreme numbers."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, min(len(data), rng.choice((64, len(data) or 1)))))
        kind = rng.randrange(6)
        if kind == 0 and data:
            for _ in range(rng.randint(1, 32)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + rng.randint(1, 64)]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 256)] * rng.randint(1, 8)
        elif kind == 4:
            data[at:] = rng.choice(files)[at:]
        else:
            data[at : at + 4] = rng.choice(EXTREMES)
    return bytes(data)


@dataclass(frozen=True)
class Library:
    """Ids and captions that the service lists."""

    images: list[str]
    texts: list[str]
    photo: bytes

    @staticmethod
    def of(service: Service) -> Library:
        listed = json.loads(fetch(f"{service.address}api/images?limit=100"))["images"]
        texts = [text for item in listed for text in item["captions"]]
        with_picture = f"{service.address}api/picture?side=320&image={listed[0]['id']}"
        photo = b""
        with suppress(OSError):
            photo = fetch(with_picture)
        return Library([item["id"] for item in listed], texts, photo)

    def request(self, kind: str, rng: random.Random) -> tuple[str, str, bytes, str]:
        image, text = rng.choice(self.images), rng.choice(self.texts)
        if kind == "picture":
            return "GET", f"/api/picture?image={image}&side=320", b"", ""
        if kind == "upload":
            return ("POST", "/api/images", *form(self.photo))
        asked: dict[str, Any] = {"image": image, "text": text}
        if kind == "search":
            asked = {"text": text, "k": 10}
        elif kind == "score":
            asked = {"images": [image], "texts": [text]}
        return "POST", f"/api/{kind}", json.dumps(asked).encode(), "application/json"


MIX = {"search": 8, "explain": 6, "score": 3, "picture": 6, "upload": 1, "correct": 1}


def fetch(address: str) -> bytes:
    with urlopen(address, timeout=60) as answer:  # noqa: S310 - an address of this machine
        return bytes(answer.read())


async def many(port: int, clients: int, count: int, make: Callable[[int], Any]) -> Tally:
    """``count`` requests, over some connections at once; ``make`` gives each by its number."""
    tally, numbers = Tally(), iter(range(count))

    async def one() -> None:
        client = Client(port)
        for number in numbers:
            started, asked = time.perf_counter(), make(number)
            try:
                answer = await client.ask(*asked)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                tally.failures.append(f"{asked[1]}: no answer ({error!r})")
                client.close()
                continue
            tally.count(asked[1], answer, time.perf_counter() - started)
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return tally


def uploads(service: Service, sizes: Sizes) -> dict[str, Any]:
    """Mutated files, one in twenty in a damaged form."""
    files, rng = seeds(), random.Random(1)

    def make(_: int) -> tuple[str, str, bytes, str]:
        body, kind = form(mutated(files, rng), rng.choice(("a.png", "../../x", "\u202e.jpg")))
        if rng.random() < 0.05:
            body = body[: rng.randrange(len(body))]
        return "POST", "/api/images", body, kind

    with probed(service) as health:
        tally = asyncio.run(many(service.port, 8, sizes.uploads, make))
    return {"tries": f"{sizes.uploads} files", **tally.summary(), **health.summary()}


def schema(service: Service, sizes: Sizes) -> dict[str, Any]:
    """Requests from the OpenAPI document; answers must be as documented."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import CHECKS
    from schemathesis.core.failures import FailureGroup

    document = schemathesis.openapi.from_url(f"{service.address}openapi.json")
    names = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
    checks = CHECKS.get_by_names([*names, "response_schema_conformance"])
    tally, operations = Tally(), 0
    few = settings(
        max_examples=sizes.examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    def fuzz(strategy: Any) -> None:
        @few
        @given(strategy)
        def one(case: Any) -> None:
            started = time.perf_counter()
            answer = case.call()
            tally.seconds.append(time.perf_counter() - started)
            tally.statuses[str(answer.status_code)] += 1
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                case.validate_response(answer, checks=checks)

        one()

    with probed(service) as health:
        for found in document.get_all_operations():
            operation, operations = found.ok(), operations + 1
            try:
                fuzz(operation.as_strategy())
            except (AssertionError, FailureGroup) as error:
                tally.failures.append(f"{operation.label}: {str(error)[:300]}")
    tries = f"{tally.statuses.total()} requests to {operations} operations"
    return {"tries": tries, **tally.summary(), **health.summary()}


def slow(service: Service, sizes: Sizes) -> dict[str, Any]:
    """Clients that trickle headers or bodies, never read, or say nothing, beside honest ones."""
    library, rng = Library.of(service), random.Random(2)
    end = time.perf_counter() + sizes.slow_seconds
    opened = 0

    async def crawl(kind: int) -> None:
        nonlocal opened
        while time.perf_counter() < end:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
                opened += 1
                try:
                    await asyncio.wait_for(misbehave(kind, reader, writer), sizes.slow_seconds)
                except asyncio.TimeoutError:
                    pass
                finally:
                    writer.close()
            await asyncio.sleep(0.05)

    async def misbehave(
        kind: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        whole = request_bytes(*library.request("search", rng))
        if kind == 0:  # a byte a second
            for byte in whole:
                writer.write(bytes([byte]))
                await asyncio.sleep(1)
        elif kind == 1:  # a body that stops
            writer.write(whole[:-5])
            await reader.read(-1)
        elif kind == 2:  # pictures that nobody reads
            writer.write(request_bytes(*library.request("picture", rng)) * 200)
            await asyncio.sleep(sizes.slow_seconds)
        else:  # silence
            await reader.read(-1)

    async def everything() -> Tally:
        crawling = [asyncio.create_task(crawl(n % 4)) for n in range(sizes.slow_clients)]
        tally = Tally()
        client = Client(service.port)
        while time.perf_counter() < end:
            started = time.perf_counter()
            asked = library.request("search", rng)
            try:
                answer = await client.ask(*asked)
                tally.count("search", answer, time.perf_counter() - started)
            except (OSError, asyncio.IncompleteReadError):  # an idle connection may be displaced
                client.close()
                tally.statuses["connection replaced"] += 1
            await asyncio.sleep(0.2)
        for task in crawling:
            task.cancel()
        await asyncio.gather(*crawling, return_exceptions=True)
        return tally

    with probed(service) as health:
        tally = asyncio.run(everything())
    tries = f"{sizes.slow_clients} slow clients, {opened} connections, {sizes.slow_seconds:.0f} s"
    return {"tries": tries, **tally.summary(), **health.summary()}


def gone(service: Service, sizes: Sizes) -> dict[str, Any]:
    """Clients that ask and leave at once, half of them with a reset; then nothing is left over."""
    library, rng = Library.of(service), random.Random(3)

    def leave(number: int) -> None:
        whole = request_bytes(*library.request(rng.choice(list(MIX)), rng))
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            if number % 2:
                linger = struct.pack("ii", 1, 0)  # close with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            with suppress(OSError):
                connection.sendall(whole[: rng.randint(1, len(whole))] if number % 3 else whole)
                time.sleep(rng.choice((0.0, 0.0, 0.005)))

    with probed(service) as health:
        for number in range(sizes.gone):
            leave(number)
        tally = asyncio.run(
            many(service.port, 1, 20, lambda _: library.request("search", random.Random(4)))
        )
        deadline = time.perf_counter() + 30
        while (left := gauges(service)) and time.perf_counter() < deadline:
            time.sleep(0.5)
    if left:
        tally.failures.append(f"left over after 30 s: {left}")
    return {"tries": f"{sizes.gone} clients", **tally.summary(), **health.summary()}


def gauges(service: Service) -> dict[str, float]:
    """Work that is not done: queued jobs, requests in progress (but this one)."""
    values = dict(
        line.rsplit(" ", 1)
        for line in fetch(f"{service.address}metrics").decode().splitlines()
        if not line.startswith("#")
    )
    found = {name: float(values[f"counterfoil_{name}"]) for name in ("waiting", "in_flight")}
    return {name: value for name, value in found.items() if value > (name == "in_flight")}


def load(service: Service, sizes: Sizes) -> dict[str, Any]:
    """Fifty clients without a pause, and a restart in the middle."""
    library, tally = Library.of(service), Tally()
    begun = time.perf_counter()
    middle, end = begun + sizes.load_seconds / 2, begun + sizes.load_seconds
    down = [float("inf"), float("-inf")]

    async def one(number: int) -> None:
        client, rng = Client(service.port), random.Random(number)
        while time.perf_counter() < end:
            kind = rng.choices(list(MIX), list(MIX.values()))[0]
            started = time.perf_counter()
            try:
                answer = await client.ask(*library.request(kind, rng))
                tally.count(kind, answer, time.perf_counter() - started)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                client.close()
                if started < down[1] and time.perf_counter() > down[0]:
                    tally.statuses["refused or cut by the restart"] += 1
                else:
                    tally.failures.append(f"{kind}: no answer ({error!r})")
                await asyncio.sleep(0.1)
        client.close()

    def restart() -> None:
        time.sleep(max(0.0, middle - time.perf_counter()))
        down[0], down[1] = time.perf_counter(), float("inf")
        service.stop()
        service.start()
        down[1] = time.perf_counter() + 1.0

    async def everything() -> None:
        await asyncio.gather(
            asyncio.to_thread(restart), *(one(number) for number in range(CLIENTS))
        )

    with probed(service) as health:
        asyncio.run(everything())
    tries = f"{CLIENTS} clients, {sizes.load_seconds:.0f} s, "
    tries += f"one restart ({down[1] - 1 - down[0]:.0f} s)"
    return {"tries": tries, **tally.summary(), **health.summary()}


def runs(service: Service, sizes: Sizes) -> dict[str, Any]:
    """The list of runs and single runs, while one of them is being written."""
    names = [run["name"] for run in json.loads(fetch(f"{service.address}api/runs"))["runs"]]
    rng, done = random.Random(5), threading.Event()
    folder = Path(service.arguments[service.arguments.index("--runs") + 1])
    written = next(folder.glob("*/metrics.jsonl"))
    line = written.read_text(encoding="utf-8").splitlines()[0] + "\n"

    def write() -> None:
        with written.open("a", encoding="utf-8", buffering=1) as file:
            while not done.wait(0.01):
                file.write(line[: len(line) // 2])
                file.write(line[len(line) // 2 :])

    def make(number: int) -> tuple[str, str]:
        return ("GET", "/api/runs" if number % 5 == 0 else f"/api/run?name={rng.choice(names)}")

    writer = threading.Thread(target=write)
    with probed(service) as health:
        writer.start()
        tally = asyncio.run(many(service.port, 4, sizes.run_reads, make))
        done.set()
        writer.join()
    tries = f"{len(names)} runs, {sizes.run_reads} requests"
    return {"tries": tries, **tally.summary(), **health.summary()}


def library(service: Service, sizes: Sizes) -> dict[str, Any]:
    """Searches of a large index, in both directions, by four clients."""
    content, rng = Library.of(service), random.Random(6)

    def make(number: int) -> tuple[str, str, bytes, str]:
        if number % 4 == 3:
            return "GET", f"/api/images?offset={rng.randrange(sizes.library)}&limit=50", b"", ""
        return content.request("search", rng)

    with probed(service) as health:
        asyncio.run(many(service.port, 4, 12, make))  # first pages of the files
        tally = asyncio.run(many(service.port, 4, sizes.library_searches, make))
    tries = f"{sizes.library:,} images and captions, {sizes.library_searches} requests"
    tries += f" (ready after {service.start_seconds:.0f} s)"
    return {"tries": tries, **tally.summary(), **health.summary()}
