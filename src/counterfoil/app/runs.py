"""Runs on disk as the page shows them: what they are, what they reached, how they got there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from counterfoil.app.problems import Problem
from counterfoil.config import RunConfig, load_config
from counterfoil.errors import CounterfoilError
from counterfoil.training.metrics import read_metrics
from counterfoil.training.plots import plots_of, thin

POINTS = 300
T = TypeVar("T")


class FileCache(Generic[T]):
    """What ``read`` makes of files, until they change."""

    def __init__(self, read: Callable[[Path], T]) -> None:
        self._read = read
        self._cached: dict[Path, tuple[tuple[int, ...], T]] = {}

    def get(self, path: Path) -> T:
        stamp = _stamp(path)  # before reading: a change meanwhile is seen the next time
        cached = self._cached.get(path)
        if cached is None or cached[0] != stamp:
            cached = (stamp, self._read(path))
            self._cached[path] = cached
        return cached[1]


class Runs:
    """Run folders by name. They are read when asked for, so that a run can be watched."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._configs, self._results = FileCache(_config), FileCache(_json)
        self._folders: dict[str, Path] = {}
        for folder in folders:
            place = folder.resolve()
            if (place / "config.yaml").is_file() and place not in self._folders.values():
                self._folders[_free_name(place.name, self._folders)] = place

    def __len__(self) -> int:
        return len(self._folders)

    def listed(self) -> list[dict[str, Any]]:
        return [self._summary(name) for name in self._folders]

    def read(self, name: str) -> dict[str, Any]:
        """One run with its plots; the name is looked up, never opened."""
        if name not in self._folders:
            raise Problem(404, "no such run here")
        folder = self._folders[name]
        config = self._configs.get(folder / "config.yaml")
        records = read_metrics(folder / "metrics.jsonl")
        split = config.evaluation.split if config is not None else "dev"
        plots = [
            {
                "name": key,
                "title": plot.title,
                "x": plot.x_label,
                "y": plot.y_label,
                "series": [
                    {"name": label, "points": _plain(thin(points, POINTS))}
                    for label, points in plot.series.items()
                ],
            }
            for key, plot in plots_of(records, split).items()
        ]
        warnings = [r["text"] for r in records if r.get("kind") == "warning"][:20]
        return {
            **self._summary(name),
            "results": self._results.get(folder / "results.json"),
            "config": config.to_yaml() if config is not None else "",
            "plots": plots,
            "warnings": warnings,
        }

    def _summary(self, name: str) -> dict[str, Any]:
        folder = self._folders[name]
        config = self._configs.get(folder / "config.yaml")
        results = self._results.get(folder / "results.json")
        return {
            "name": name,
            "model": config.model.name if config is not None else "unknown",
            "objective": " + ".join(config.objective) if config is not None else "",
            "data": Path(config.data.source).name if config is not None else "",
            "rsum": results.get("rsum") if isinstance(results.get("rsum"), float) else None,
            "finished": bool(results),
        }


def runs_below(folder: Path) -> list[Path]:
    """Run folders in a folder, in the order of their names."""
    return sorted(path.parent for path in folder.glob("*/config.yaml"))


def _free_name(name: str, taken: Iterable[str]) -> str:
    used, number, free = set(taken), 2, name
    while free in used:
        free, number = f"{name}-{number}", number + 1
    return free


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs when a file does; empty where there is none."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return (about.st_mtime_ns, about.st_size, about.st_ino)


def _config(path: Path) -> RunConfig | None:
    try:
        return load_config(path)
    except CounterfoilError:
        return None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none yet. NaN, which JSON lacks, becomes null."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
