"""Where a run writes its records: `metrics.jsonl`, `timing.jsonl`, and TensorBoard if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from counterfoil.collectives import rank
from counterfoil.training.checkpoint import Position
from counterfoil.training.metrics import MetricsLog
from counterfoil.training.tensorboard import TensorBoard


class RunLogs:
    """`metrics.jsonl`, which repeats bit by bit, and `timing.jsonl`, which cannot."""

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
