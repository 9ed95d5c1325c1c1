"""TensorBoard as a second place for the numbers of `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterfoil.errors import MissingExtraError


class TensorBoard:
    """Writes the numbers of a record under its kind."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard", "train.tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        shown = {key: value for key, value in record.items() if not key.endswith("_histogram")}
        self._write(record["kind"], shown, record["step"])

    def _write(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                self._write(f"{prefix}/{key}", value, step)
            elif isinstance(value, (int, float)) and key not in ("step", "epoch"):
                self._writer.add_scalar(f"{prefix}/{key}", value, step)

    def close(self) -> None:
        self._writer.close()
