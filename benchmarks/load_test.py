"""Many clients at once against the service on loopback: latency, errors, memory, batching's gain.

    python benchmarks/load_test.py                         # trains a small NAAF on scenes first
    python benchmarks/load_test.py --run runs/scenes-naaf --corrector runs/scenes-tags-dc

Clients ask as fast as they are answered: searches, explanations, scores, pictures, uploads and,
with a corrector, corrections. Then the same searches and scores are asked of a service that takes
work one by one and of one that takes it in batches; the ratio of their rates is batching's gain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "counterfoil"
MIX = {"search": 8, "explain": 6, "score": 3, "picture": 6, "upload": 1, "correct": 2}
SMALL = [
    "data.source=scenes", "data.options.images=[400,20,200]", "model.name=naaf",
    "model.embed_size=128", "train.epochs=2", "evaluation.bootstrap=0",
]  # fmt: skip


def serve_here(run: Path, corrector: Path | None, batch: int) -> None:
    """The service with batches of at most ``batch``; runs in a process of its own."""
    from counterfoil.app.application import serve
    from counterfoil.app.connections import Limits
    from counterfoil.app.content import open_content
    from counterfoil.core.progress import Silent

    content = open_content(run, corrector=corrector, cache=CACHE, progress=Silent())
    limits = replace(Limits(), batch=batch)
    serve(content, "127.0.0.1", 0, limits, lambda address: print(address, flush=True))


@contextmanager
def service(run: Path, corrector: Path | None, batch: int) -> Iterator[str]:
    """The address of a service that runs while the block does; it must stop by itself."""
    command = [sys.executable, __file__, "--serve", "--run", str(run), "--batch", str(batch)]
    command += ["--corrector", str(corrector)] if corrector is not None else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), "the service did not start"
        yield address
    finally:
        process.terminate()
        process.wait(60)


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310
        return bytes(answer.read())


class Client:
    """One kept connection that speaks just enough HTTP."""

    def __init__(self, address: str) -> None:
        found = re.fullmatch(r"http://([\d.]+):(\d+)/", address)
        assert found is not None
        self.host, self.port = found[1], int(found[2])
        self.reader: asyncio.StreamReader | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> int:
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: {kind}\r\n\r\n" if kind else "\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = re.search(r"content-length: (\d+)", answer)
        assert length is not None
        await self.reader.readexactly(int(length[1]))
        return int(answer.split()[1])

    async def close(self) -> None:
        if self.reader is not None:
            self.writer.close()


@dataclass
class Tally:
    """Seconds of every answer by kind, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.seconds.values()))


@dataclass(frozen=True)
class Content:
    images: list[str]
    texts: list[str]
    photo: bytes

    @staticmethod
    def of(address: str) -> Content:
        listed = json.loads(fetch(f"{address}api/images?limit=100"))["images"]
        ids = [item["id"] for item in listed]
        texts = [text for item in listed for text in item["captions"]]
        return Content(ids, texts, fetch(f"{address}api/picture?image={ids[0]}&side=320"))


def request(kind: str, content: Content, rng: random.Random) -> tuple[str, str, bytes, str]:
    image, text = rng.choice(content.images), rng.choice(content.texts)
    if kind == "picture":
        return "GET", f"/api/picture?image={image}&side=320", b"", ""
    if kind == "upload":
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        body = head + content.photo + b"\r\n--x--\r\n"
        return "POST", "/api/images", body, "multipart/form-data; boundary=x"
    asked: dict[str, Any] = {"image": image, "text": text}
    if kind == "search":
        asked = {"text": text, "k": 10}
    elif kind == "score":
        asked = {"images": [image], "texts": [text]}
    return "POST", f"/api/{kind}", json.dumps(asked).encode(), "application/json"


async def load(
    address: str, content: Content, clients: int, seconds: float, mix: dict[str, int]
) -> Tally:
    """All clients ask, each its next question when the last was answered."""
    tally, end = Tally(), time.perf_counter() + seconds

    async def one(number: int) -> None:
        client, rng = Client(address), random.Random(number)
        while time.perf_counter() < end:
            kind = rng.choices(list(mix), list(mix.values()))[0]
            started = time.perf_counter()
            status = await client.ask(*request(kind, content, rng))
            tally.seconds[kind].append(time.perf_counter() - started)
            if status not in (200, 201):
                tally.errors.append(f"{kind}: {status}")
        await client.close()

    async def watch() -> None:
        while time.perf_counter() < end:
            text = (await asyncio.to_thread(fetch, f"{address}metrics")).decode()
            found = re.search(r"^process_resident_memory_bytes (\S+)", text, re.M)
            tally.memory.append(float(found[1]) if found else 0.0)
            await asyncio.sleep(min(2.0, seconds / 10))

    await asyncio.gather(watch(), *(one(number) for number in range(clients)))
    return tally


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def mean_batch(address: str, kind: str) -> float:
    text = fetch(f"{address}metrics").decode()
    part = {
        what: float(found[1])
        for what in ("sum", "count")
        if (
            found := re.search(
                rf'^counterfoil_batch_jobs_{what}{{kind="{kind}"}} (\S+)', text, re.M
            )
        )
    }
    return part["sum"] / part["count"] if part.get("count") else 0.0


def measure(args: argparse.Namespace, run: Path) -> dict[str, Any]:
    mix = {k: v for k, v in MIX.items() if k != "correct" or args.corrector is not None}
    with service(run, args.corrector, 32) as address:
        content = Content.of(address)
        asyncio.run(load(address, content, args.clients, min(5.0, args.seconds), mix))  # warm
        tally = asyncio.run(load(address, content, args.clients, args.seconds, mix))
    result: dict[str, Any] = {
        "clients": args.clients, "seconds": args.seconds, "requests": tally.count,
        "errors": len(tally.errors), "rate": tally.count / args.seconds,
        "memory_mib": [round(value / 2**20) for value in tally.memory],
    }  # fmt: skip
    every = [second for found in tally.seconds.values() for second in found]
    rows = {"all": every, **tally.seconds}
    print(
        f"{args.clients} clients, {args.seconds:.0f} s: {tally.count} answers "
        f"({result['rate']:.0f} a second), {len(tally.errors)} errors {tally.errors[:3]}"
    )
    print(f"{'':10}{'answers':>9}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}")
    for name, found in rows.items():
        marks = {f"p{p}": 1000 * quantile(found, p / 100) for p in (50, 95, 99)}
        result[name] = {"answers": len(found), **marks}
        print(f"{name:10}{len(found):>9}" + "".join(f"{mark:>9.0f}" for mark in marks.values()))
    memory = result["memory_mib"]
    third = max(1, len(memory) // 3)
    result["memory_growth_mib"] = max(memory[-third:]) - max(memory[:third])
    print(
        f"memory: {min(memory)} to {max(memory)} MiB, "
        f"{result['memory_growth_mib']:+} MiB from the first third to the last"
    )
    return result


def compare(args: argparse.Namespace, run: Path) -> dict[str, Any]:
    """The rate of one kind of request, one by one and in batches."""
    found: dict[str, Any] = {}
    for kind in ("search", "score"):
        rates = {}
        for batch in (1, 32):
            with service(run, None, batch) as address:
                content = Content.of(address)
                asyncio.run(load(address, content, args.clients, 2.0, {kind: 1}))
                tally = asyncio.run(
                    load(address, content, args.clients, args.compare_seconds, {kind: 1})
                )
                rates[batch] = tally.count / args.compare_seconds
                size = mean_batch(address, kind)
        found[kind] = {"one_by_one": rates[1], "batched": rates[32], "gain": rates[32] / rates[1]}
        print(
            f"{kind}: {rates[1]:.0f} a second singly, {rates[32]:.0f} in batches (of {size:.1f}, "
            f"mean): {rates[32] / rates[1]:.2f} times as many"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--corrector", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compare-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=32, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_here(args.run, args.corrector, args.batch)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or Path(folder) / "run"
        if args.run is None:
            train = [sys.executable, "-m", "counterfoil", "train", *SMALL, "--out", str(run)]
            subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
        result = {**measure(args, run), "batching": compare(args, run)}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2))
    if result["errors"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
