"""`metrics.jsonl`: one JSON object a line, the source of every plot and table of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any


class MetricsLog:
    """Appends records; a resumed run first cuts off what its checkpoint does not know of."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False, default=float)
        self._file.write(line.encode("utf-8") + b"\n")
        self._file.flush()

    @property
    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a run; a last line cut short by a kill is left out."""
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def finite(value: float) -> float | None:
    """A number fit for JSON: None where it is not finite."""
    return value if math.isfinite(value) else None
