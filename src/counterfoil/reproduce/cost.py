"""What a finished run says of its own training: how long it took, and where it was best."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterfoil.files import write_atomically
from counterfoil.training.metrics import read_metrics


@dataclass(frozen=True)
class Cost:
    """Seconds from the first batch to the last evaluation, and the epoch that dev chose.

    ``device_seconds`` are these divided by the number of runs that shared the device, and
    ``gpu_seconds`` the same where that was a GPU. None where the run did not log it. ``dev`` has
    every metric of the best epoch.
    """

    seconds: float | None
    device_seconds: float | None
    gpu_seconds: float | None
    updates: float | None
    best_epoch: float | None
    dev_rsum: float | None
    dev: dict[str, float]


def read_cost(folder: Path, split: str = "dev") -> Cost:
    """The cost of the run in a folder; ``split`` is the one that it was selected on."""
    epochs = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "epoch"]
    judged = [record for record in epochs if split in record]
    # the first of equals is the one that was kept
    best: dict[str, Any] = max(judged, key=lambda record: record[split]["rsum"], default={})
    dev = dict(best.get(split, {}))
    timed = _last_timed(folder / "timing.jsonl")
    seconds = None if timed is None else float(timed["seconds"])
    shared = None if seconds is None else seconds / _shared_by(folder)
    return Cost(
        seconds=seconds,
        device_seconds=shared,
        gpu_seconds=shared if timed is not None and timed.get("device") == "cuda" else None,
        updates=epochs[-1]["step"] if epochs else None,
        best_epoch=best.get("epoch"),
        dev_rsum=dev.get("rsum"),
        dev=dev,
    )


def _last_timed(path: Path) -> dict[str, Any] | None:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            timed: dict[str, Any] = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        return timed
    return None


def note_sharing(folder: Path, at_once: int) -> None:
    """Remember how many were carried out at a time where the run in this folder was."""
    path = _sharing(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{at_once}\n")


def _shared_by(folder: Path) -> int:
    path = _sharing(folder)
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return max(1, int(text)) if text.isdigit() else 1


def _sharing(folder: Path) -> Path:
    """Beside the runs: what lies in a run's own folder is the run's alone."""
    return folder.parent.parent / "shared" / folder.name
