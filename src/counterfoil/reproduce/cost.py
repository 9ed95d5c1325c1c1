"""What a finished run says of its own training: how long it took, and where it was best."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterfoil.training.metrics import read_metrics


@dataclass(frozen=True)
class Cost:
    """Seconds from the first batch to the last evaluation, and the epoch that dev chose.

    None where the run did not log it. ``dev`` has every metric of that epoch.
    """

    seconds: float | None
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
    return Cost(
        seconds=_last_seconds(folder / "timing.jsonl"),
        updates=epochs[-1]["step"] if epochs else None,
        best_epoch=best.get("epoch"),
        dev_rsum=dev.get("rsum"),
        dev=dev,
    )


def _last_seconds(path: Path) -> float | None:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            return float(json.loads(line)["seconds"])
        except (ValueError, KeyError):  # cut short by a kill
            continue
    return None
