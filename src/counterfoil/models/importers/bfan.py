"""BFAN (CrossmodalGroup/BFAN): SCAN's encoders, focal attention both ways."""

from __future__ import annotations

from typing import Any

from counterfoil.models.importers.base import importers
from counterfoil.models.importers.scan import ScanFamily


@importers.register("bfan")
class BfanImporter(ScanFamily):
    """BFAN: bidirectional focal attention, equal or prob."""

    title = "BFAN"
    mark = "opt.focal_type"

    def matcher(self) -> tuple[str, dict[str, Any]]:
        return "bfan", {
            "name": "bfan",
            "focal": self.options.choice("focal_type", {"equal": "equal", "prob": "prob"}),
            "lambda_softmax": self.options.number("lambda_softmax"),
        }
