"""Numbers of the service in Prometheus' text format."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from pathlib import Path

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """How many values fell below each edge, their number and their sum."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        below, lines = 0, []
        for edge, count in zip((*map(str, self.edges), "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {below}')
        return [
            *lines,
            f"{name}_sum{{{labels}}} {self.sum:.6f}",
            f"{name}_count{{{labels}}} {below}",
        ]


class Meters:
    """Counts of requests and batches; ``gauges`` are read when they are asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._batches: dict[str, Histogram] = {}
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "process_resident_memory_bytes": ("Memory in use.", resident_bytes)
        }

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[method, route, status] += 1
            self._seconds.setdefault(route, Histogram(SECONDS)).add(seconds)

    def batch(self, kind: str, jobs: int) -> None:
        with self._lock:
            self._batches.setdefault(kind, Histogram(SIZES)).add(jobs)

    def text(self) -> str:
        with self._lock:
            lines = _head("counterfoil_requests_total", "Requests answered.", "counter")
            for (method, route, status), count in sorted(self._requests.items()):
                labels = f'method="{method}",route="{route}",status="{status}"'
                lines.append(f"counterfoil_requests_total{{{labels}}} {count}")
            for name, about, key, found in (
                ("request_seconds", "Seconds to an answer.", "route", self._seconds),
                ("batch_jobs", "Pieces of work in a batch.", "kind", self._batches),
            ):
                lines += _head(f"counterfoil_{name}", about, "histogram")
                for label, histogram in sorted(found.items()):
                    lines += histogram.lines(f"counterfoil_{name}", f'{key}="{label}"')
        for name, (about, read) in self.gauges.items():
            lines += [*_head(name, about, "gauge"), f"{name} {read():g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def resident_bytes() -> float:
    """Memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
