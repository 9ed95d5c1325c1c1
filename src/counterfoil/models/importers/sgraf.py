"""SGRAF (Paranioar/SGRAF): SCAN's encoders, similarity vectors, graph reasoning or filtration."""

from __future__ import annotations

from typing import Any

from counterfoil.matchers.sgraf import REFERENCE_KEYS
from counterfoil.models.importers.base import importers
from counterfoil.models.importers.scan import IMAGE_NAMES, TEXT_NAMES, ScanFamily

DROPOUT = 0.4  # of word vectors, fixed in the public code
SIMILARITY = 2


@importers.register("sgraf")
class SgrafImporter(ScanFamily):
    """SGRAF: one of its two models, SGR or SAF; `counterfoil evaluate` averages both."""

    title = "SGRAF"
    mark = "opt.module_name"
    parts = ("image encoder", "text encoder", "similarity encoder")
    names = (
        IMAGE_NAMES,
        {"cap_rnn.": "text_encoder.rnn.", **TEXT_NAMES},
        {theirs: f"matcher.{ours}" for theirs, ours in REFERENCE_KEYS.items()},
    )
    unused = ((), (), ())

    def matcher(self) -> tuple[str, dict[str, Any]]:
        name = self.options.choice("module_name", {"SGR": "sgr", "SAF": "saf"})
        matcher: dict[str, Any] = {
            "name": name,
            "form": "reference",
            "sim_dim": self.size(SIMILARITY, "sim_eval_w.weight", 1),
            "slots": self.size(SIMILARITY, "v_global_w.embedding_local.1.weight", 0),
        }
        if name == "sgr":
            keys = self.checkpoint.states[SIMILARITY]
            steps = {key.split(".")[1] for key in keys if key.startswith("SGR_module.")}
            matcher["steps"] = self.layers(len(steps))
        return name, matcher

    def text_options(self) -> dict[str, Any]:
        return {**super().text_options(), "dropout": DROPOUT}
