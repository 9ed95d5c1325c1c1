"""Logs of a run: `metrics.jsonl`, `timing.jsonl`, and TensorBoard with train.tensorboard.

`metrics.jsonl` has one JSON object per line and is the source of all plots and tables of a run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from counterfoil.core.distributed import rank
from counterfoil.core.errors import DataError, MissingExtraError
from counterfoil.core.storage.reading import JSON_BYTES, open_regular, read_lines
from counterfoil.training.checkpoint import Position


class MetricsLog:
    """Appends records; a resumed run first truncates the file to its checkpoint."""

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
    """Records of a run, up to a line that is not a record, such as one that a kill truncated."""
    records: list[dict[str, Any]] = []
    try:
        with open_regular(path, JSON_BYTES) as file:
            for line in read_lines(file, path):
                record = json.loads(line)
                if not isinstance(record, dict):
                    break
                records.append(record)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        pass
    return records


def finite(value: float) -> float | None:
    """The value, or None if it is not finite, for JSON."""
    return value if math.isfinite(value) else None


class TensorBoard:
    """Writes the numbers of a record under its kind."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard", "train.tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        scalars = {key: value for key, value in record.items() if not key.endswith("_histogram")}
        self._write(record["kind"], scalars, record["step"])

    def _write(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                self._write(f"{prefix}/{key}", value, step)
            elif isinstance(value, (int, float)) and key not in ("step", "epoch"):
                self._writer.add_scalar(f"{prefix}/{key}", value, step)

    def close(self) -> None:
        self._writer.close()


class RunLogs:
    """`metrics.jsonl`, which is reproducible bit by bit, and `timing.jsonl`, which is not."""

    def __init__(self, folder: Path, position: Position, tensorboard: bool, device: str) -> None:
        self.active = rank() == 0
        self.device = device
        if not self.active:
            return
        self.metrics = MetricsLog(folder / "metrics.jsonl", position.metrics_bytes)
        self.timing = (folder / "timing.jsonl").open("a", encoding="utf-8")
        self.board = TensorBoard(folder) if tensorboard else None

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.metrics.close()
            self.timing.close()
            if self.board:
                self.board.close()

    def write(self, record: dict[str, Any], seconds: float) -> None:
        if self.active:
            self.metrics.write(record)
            timed = {"step": record["step"], "seconds": round(seconds, 3), "device": self.device}
            self.timing.write(f"{json.dumps(timed)}\n")
            self.timing.flush()
            if self.board:
                self.board.write(record)

    @property
    def size(self) -> int:
        return self.metrics.size if self.active else 0
