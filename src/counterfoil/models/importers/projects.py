"""Importers of public checkpoints: SCAN, the projects that share its encoders, and VSE∞."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from counterfoil.core.errors import CheckpointError
from counterfoil.data.text.vocabulary import END, PAD, START, UNK
from counterfoil.matchers.mismatch_boundary import BINS
from counterfoil.matchers.sgraf import REFERENCE_KEYS
from counterfoil.models.catalogue import ModelSpec
from counterfoil.models.importers.base import Importer, importers
from counterfoil.models.importers.vocabularies import SPECIALS, entries_of

AGGREGATIONS = {"LogSumExp": "lse", "Mean": "mean", "Max": "max", "Sum": "sum"}
RAW_NORMS = {
    "clipped_l2norm": "clipped_l2norm",
    "l2norm": "l2norm",
    "clipped": "clipped",
    "softmax": "softmax",
    "no_norm": "none",
}
IMAGE_NAMES: Mapping[str, str] = {
    "fc.weight_g": "image_encoder.fc.parametrizations.weight.original0",
    "fc.weight_v": "image_encoder.fc.parametrizations.weight.original1",
    "fc.": "image_encoder.fc.",
}
TEXT_NAMES: Mapping[str, str] = {
    "embed.weight": "text_encoder.embed.weight",
    "rnn.": "text_encoder.rnn.",
}


class ScanFamily(Importer):
    """Projects on SCAN's encoders: one linear layer, an averaged GRU, fragments kept."""

    names: Sequence[Mapping[str, str]] = (IMAGE_NAMES, TEXT_NAMES)

    def spec(self) -> ModelSpec:
        name, matcher = self.matcher()
        return ModelSpec(
            name=name,
            embed_size=self.size(0, "fc.bias", 0),
            image=self.image_options(),
            text={**self.text_options(), "pooling": "none"},
            matcher=matcher,
        )

    def matcher(self) -> tuple[str, dict[str, Any]]:
        """The model's name and its matcher with options."""
        raise NotImplementedError

    def image_options(self) -> dict[str, Any]:
        kinds = {"basic": False, "weight_norm": True}
        return {
            "name": "fc",
            "pooling": "none",
            "weight_norm": self.options.choice("precomp_enc_type", kinds, absent="basic"),
            "normalize": not self.options.flag("no_imgnorm", False),
        }


@importers.register("scan")
class ScanImporter(ScanFamily):
    """SCAN: stacked cross attention, t2i or i2t."""

    title = "SCAN"
    mark = "opt.cross_attn"

    def matcher(self) -> tuple[str, dict[str, Any]]:
        options = self.options
        name = options.choice("cross_attn", {"t2i": "scan-t2i", "i2t": "scan-i2t"})
        aggregation = options.choice("agg_func", AGGREGATIONS)
        matcher: dict[str, Any] = {
            "name": name,
            "lambda_softmax": options.number("lambda_softmax"),
            "aggregation": aggregation,
            "raw_norm": options.choice("raw_feature_norm", RAW_NORMS),
        }
        if aggregation == "lse":
            matcher["lambda_lse"] = options.number("lambda_lse")
        return name, matcher


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


STATE = ("thres", "thres_safe", "mean_pos", "mean_neg", "stnd_pos", "stnd_neg")
"""Options with the boundary's state, in the order of the matcher's buffer."""


@importers.register("naaf")
class NaafImporter(ScanFamily):
    """NAAF: negative-aware attention, with its learned boundary."""

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
        normalize = not self.options.flag("no_imgnorm", False)
        return {**encoder, "pooling": "none", "normalize": normalize}

    def entries(self) -> Sequence[str] | None:
        """CHAN keeps ``word2idx`` among its options, ``<mask>`` included."""
        index = self.options.values.get("word2idx")
        source = f"{self.checkpoint.path}: opt.word2idx"
        return entries_of(index, source) if isinstance(index, dict) else None


@importers.register("vse_infty")
class VseInftyImporter(Importer):
    """VSE∞ with BiGRU over precomputed regions."""

    title = "VSE∞"
    mark = "gpool."
    names = (
        {
            "fc.": "image_encoder.fc.",
            "mlp.layers.0.": "image_encoder.mlp.narrow.",
            "mlp.layers.1.": "image_encoder.mlp.widen.",
            "mlp.bns.0.": "image_encoder.mlp.norm.",
            "gpool.": "image_encoder.joint.pool.",
        },
        {
            "embed.weight": "text_encoder.embed.weight",
            "rnn.": "text_encoder.rnn.",
            "gpool.": "text_encoder.joint.pool.",
        },
    )
    unused = (("mlp.bns.1.",), ())
    appends_mask = True

    def spec(self) -> ModelSpec:
        if any(key.startswith("bert.") for key in self.text):
            raise CheckpointError(
                f"{self.checkpoint.path}: its text encoder is BERT (the master branch), whose "
                "tokenizer is not in the checkpoint; only the bigru branch can be imported"
            )
        self.options.choice("precomp_enc_type", {"basic": "basic"}, absent="basic")
        return ModelSpec(
            name="vse-infty",
            embed_size=self.size(0, "fc.bias", 0),
            image={
                "name": "mlp",
                "residual": "raw",
                "hidden": self.size(0, "mlp.layers.0.bias", 0),
                "pooling": self._pooling(0),
                "normalize": not self.options.flag("no_imgnorm", False),
                "form": "reference",
            },
            text={**self.text_options(), "pooling": self._pooling(1)},
            matcher={"name": "cosine"},
        )

    def _pooling(self, part: int) -> dict[str, object]:
        return {
            "name": "gpo",
            "d_pe": self.size(part, "gpool.gru.weight_ih_l0", 1),
            "d_hidden": self.size(part, "gpool.gru.weight_hh_l0", 1),
        }
