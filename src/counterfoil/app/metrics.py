"""Numbers of the service for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)

disable_created_metrics()


class Meters:
    """Counts of requests and batches of one service; gauges are read when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "counterfoil_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "counterfoil_request_seconds",
            "Seconds to an answer.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._batches = Histogram(
            "counterfoil_batch_jobs",
            "Pieces of work in a batch.",
            ("kind",),
            buckets=SIZES,
            registry=self.registry,
        )

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """A value that is read whenever the numbers are asked for."""
        Gauge(f"counterfoil_{name}", about, registry=self.registry).set_function(read)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, kind: str, jobs: int) -> None:
        self._batches.labels(kind).observe(jobs)

    def text(self) -> str:
        return generate_latest(self.registry).decode("utf-8")
