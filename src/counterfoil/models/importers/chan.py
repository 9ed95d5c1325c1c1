"""CHAN (ppanzx/CHAN) with BiGRU: regions that see each other, hard assignment."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from counterfoil.errors import CheckpointError
from counterfoil.models.importers.base import importers
from counterfoil.models.importers.scan import TEXT_NAMES, ScanFamily
from counterfoil.models.importers.vocabularies import entries_of

CODINGS = {"VHACoding": "vha", "THACoding": "tha", "VSACoding": "vsa"}
POOLINGS = {
    "LSEPooling": "lse",
    "MeanPooling": "mean",
    "MaxPooling": "max",
    "SumPooling": "sum",
    "SoftmaxPooling": "softmax",
}
HEADS = 8  # fixed in the public code
ENCODERS: dict[str, dict[str, Any]] = {
    "basic": {"name": "fc"},
    "selfattention": {"name": "self-attention", "heads": HEADS, "form": "reference"},
    "transformer": {"name": "transformer", "heads": HEADS, "form": "reference"},
}


@importers.register("chan")
class ChanImporter(ScanFamily):
    """CHAN: cross-modal hard aligning, any of its codings and poolings."""

    title = "CHAN"
    mark = "opt.coding_type"
    parts = ("image encoder", "text encoder", "similarity", "criterion")
    names = (
        {
            "fc.": "image_encoder.fc.",
            "feedforward.ln_1.": "image_encoder.norm.",
            "feedforward.ln.": "image_encoder.norm.",
            "feedforward.attn.": "image_encoder.attention.",
            "feedforward.ln_2.": "image_encoder.mlp_norm.",
            "feedforward.mlp.c_fc.": "image_encoder.mlp.widen.",
            "feedforward.mlp.c_proj.": "image_encoder.mlp.narrow.",
        },
        TEXT_NAMES,
        {},
        {},
    )
    unused = ((), ("fc.",), (), ())
    appends_mask = True

    def matcher(self) -> tuple[str, dict[str, Any]]:
        encoder = self.options.values.get("text_enc_type", "bigru")
        if not isinstance(encoder, str) or encoder != "bigru":
            raise CheckpointError(
                f"{self.checkpoint.path}: opt.text_enc_type={reprlib.repr(encoder)} is not "
                "supported (supported: bigru); the tokenizer of a BERT text encoder is not in the "
                "checkpoint"
            )
        matcher: dict[str, Any] = {
            "name": "chan",
            "form": "reference",
            "coding": self.options.choice("coding_type", CODINGS),
            "pooling": self.options.choice("pooling_type", POOLINGS),
        }
        if matcher["pooling"] in ("lse", "softmax"):
            matcher["beta"] = self.options.number("belta")
        if matcher["coding"] == "vsa":
            matcher["alpha"] = self.options.number("alpha")
        return "chan", matcher

    def image_options(self) -> dict[str, Any]:
        encoder = self.options.choice("precomp_enc_type", ENCODERS, absent="basic")
        normalise = not self.options.flag("no_imgnorm", False)
        return {**encoder, "pooling": "none", "normalise": normalise}

    def entries(self) -> Sequence[str] | None:
        """CHAN keeps ``word2idx`` among its options, ``<mask>`` included."""
        index = self.options.values.get("word2idx")
        source = f"{self.checkpoint.path}: opt.word2idx"
        return entries_of(index, source) if isinstance(index, dict) else None
