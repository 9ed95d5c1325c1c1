"""Training runs of the web service, read per request, so that a run can be watched."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from counterfoil.app.problems import Problem
from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.errors import CounterfoilError, DataError
from counterfoil.core.storage.locks import LOCK, Holder
from counterfoil.core.storage.reading import MIB, read_text
from counterfoil.training.logs import read_metrics
from counterfoil.training.plots import plots_of, thin

MAX_POINTS = 300
RESULTS_BYTES = MIB
"""A run's results are some kilobytes. Larger ones would delay all requests while they are sent."""
T = TypeVar("T")


class FileCache(Generic[T]):
    """Results of ``read`` per file, until the file changes."""

    def __init__(self, read: Callable[[Path], T]) -> None:
        self._read = read
        self._cached: dict[Path, tuple[tuple[int, ...], T]] = {}

    def get(self, path: Path) -> T:
        stamp = _stamp(path)  # before reading, so that a change meanwhile is noticed next time
        cached = self._cached.get(path)
        if cached is None or cached[0] != stamp:
            cached = (stamp, self._read(path))
            self._cached[path] = cached
        return cached[1]


class Runs:
    """Run folders by name: those given, and those below a folder, which may appear later."""

    def __init__(self, folders: Iterable[Path], below: Path | None = None) -> None:
        self._configs, self._results = FileCache(_config), FileCache(_json)
        self._given, self._below = list(folders), below
        self._names: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._current()

    def __len__(self) -> int:
        return len(self._current())

    def listed(self) -> list[dict[str, Any]]:
        return [self._summary(name, folder) for name, folder in self._current().items()]

    def read(self, name: str) -> dict[str, Any]:
        """One run with its plots; the name is looked up, never used as a path."""
        folder = self._current().get(name)
        if folder is None:
            raise Problem(404, "no such run; see /api/runs")
        config = self._configs.get(folder / "config.yaml")
        split = config.evaluation.split if config is not None else "dev"
        return {
            **self._summary(name, folder),
            "results": self._results.get(folder / "results.json"),
            "config": config.to_yaml() if config is not None else "",
            **_curves(folder, split),
            "epochs": config.train.epochs if config is not None else None,
        }

    def _current(self) -> dict[str, Path]:
        """Folders of the present runs by name; a folder keeps the name that it got first."""
        with self._lock:
            below = runs_below(self._below) if self._below is not None else []
            paths = dict.fromkeys(folder.resolve() for folder in [*self._given, *below])
            present = [path for path in paths if (path / "config.yaml").is_file()]
            for path in present:
                if path not in self._names:
                    self._names[path] = free_name(path.name, self._names.values())
            return {self._names[path]: path for path in present}

    def _summary(self, name: str, folder: Path) -> dict[str, Any]:
        config = self._configs.get(folder / "config.yaml")
        results = self._results.get(folder / "results.json")
        holder = Holder.read(folder / LOCK)
        return {
            "name": name,
            "model": config.model.name if config is not None else "unknown",
            "objective": " + ".join(config.objective) if config is not None else "",
            "data": Path(config.data.source).name if config is not None else "",
            "rsum": results.get("rsum") if isinstance(results.get("rsum"), float) else None,
            "finished": bool(results),
            "training": holder is not None and not holder.is_gone,
        }


def runs_below(folder: Path) -> list[Path]:
    """Run folders in a folder, in the order of their names."""
    return sorted(path.parent for path in folder.glob("*/config.yaml"))


def free_name(name: str, taken: Iterable[str]) -> str:
    """The name, or the name with the first number that makes it unique."""
    used, number, free = set(taken), 2, name
    while free in used:
        free, number = f"{name}-{number}", number + 1
    return free


def _curves(folder: Path, split: str) -> dict[str, Any]:
    """What `metrics.jsonl` has; a file that no run writes is a warning, not a failed request."""
    try:
        records = read_metrics(folder / "metrics.jsonl")
        plots = [
            {
                "name": key,
                "title": plot.title,
                "x": plot.x_label,
                "y": plot.y_label,
                "series": [
                    {"name": label, "points": _finite(thin(points, MAX_POINTS))}
                    for label, points in plot.series.items()
                ],
            }
            for key, plot in plots_of(records, split).items()
        ]
        warnings = [str(r["text"]) for r in records if r.get("kind") == "warning"][:20]
        return {"plots": plots, "warnings": warnings, "epochs_done": _epochs_done(records)}
    except (DataError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        text = "metrics.jsonl cannot be read, or has records that no run writes: no curves"
        return {"plots": [], "warnings": [text], "epochs_done": 0}


def _epochs_done(records: Sequence[dict[str, Any]]) -> int:
    done = (record for record in reversed(records) if record.get("kind") == "epoch")
    return int(next(done, {"epoch": 0})["epoch"])


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes with the file; empty if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _config(path: Path) -> RunConfig | None:
    try:
        return load_config(path)
    except CounterfoilError:
        return None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no file yet; NaN becomes null, as JSON has no NaN."""
    try:
        tree = json.loads(read_text(path, RESULTS_BYTES), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
