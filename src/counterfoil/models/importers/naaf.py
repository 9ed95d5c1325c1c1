"""NAAF (CrossmodalGroup/NAAF): SCAN's encoders, a boundary that was learned beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from counterfoil.data.vocabulary import END, PAD, START, UNK
from counterfoil.matchers.mismatches import BINS
from counterfoil.models.importers.base import importers
from counterfoil.models.importers.scan import IMAGE_NAMES, TEXT_NAMES, ScanFamily
from counterfoil.models.importers.vocabularies import SPECIALS

STATE = ("thres", "thres_safe", "mean_pos", "mean_neg", "stnd_pos", "stnd_neg")
"""The boundary's state, in the order of the matcher's buffer."""


@importers.register("naaf")
class NaafImporter(ScanFamily):
    """NAAF: negative-aware attention, with the boundary it had learned."""

    title = "NAAF"
    mark = "opt.thres_safe"
    names = (IMAGE_NAMES, {"embed.glove.": "text_encoder.embed.", **TEXT_NAMES})

    def matcher(self) -> tuple[str, dict[str, Any]]:
        matcher = {
            "name": "naaf-reference",
            "lambda_softmax": self.options.number("lambda_softmax"),
        }
        if "alpha" in self.options:
            matcher["alpha"] = self.options.number("alpha")
        return "naaf", matcher

    def learned(self) -> dict[str, Tensor]:
        """The public code keeps the boundary in its options; inference reads ``thres_safe``."""
        state = [
            self.options.number(name) if name == "thres_safe" or name in self.options else 0.0
            for name in STATE
        ]
        return {
            "matcher.reference.state": torch.tensor(state, dtype=torch.float64),
            "matcher.reference.histogram": torch.zeros(2, BINS, dtype=torch.float64),
        }

    @property
    def specials(self) -> Sequence[str]:
        glove = any(key.startswith("embed.glove.") for key in self.text)
        return (PAD, UNK, START, END) if glove else SPECIALS
