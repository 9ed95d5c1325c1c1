"""With which other options, and which values, an option is tried (`test_options`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.option_probes import CROSS, DIM

VSE = {"name": "vse-fc", "embed_size": DIM, "text": {"word_dim": 6}}
LOCAL = {"name": "scan-t2i", "embed_size": DIM, "text": {"word_dim": 6}}
BOTH = {"name": "vse-infty", "embed_size": DIM, "text": {"word_dim": 6}}
SETS = {
    "name": "dive",
    "embed_size": DIM,
    "image": {"heads": 2, "head_dim": 4, "depth": 1},
    "text": {"word_dim": 6, "heads": 2, "head_dim": 4, "depth": 1},
}

MODELS: dict[str, dict[str, Any]] = {
    "alignment": CROSS,
    "captioning": BOTH,
    "cfm": LOCAL,
    "fsc-clip": BOTH,
    "hard-candidates": CROSS,
    "hrem-graph": BOTH,
    "mlm": CROSS,
    "ncr": {**VSE, "ensemble_size": 2},
    "tags": CROSS,
    "tags-dc": CROSS,
    "uniformity": SETS,
}
"""Of the objectives that need another model than VSE (FC)."""

BASES: dict[tuple[str, str], dict[str, Any]] = {
    ("image encoder", "dive"): {"heads": 2, "head_dim": 4, "depth": 2},
    ("image encoder", "dual"): {"pretrained": "$CLIP", "projection": "new"},
    ("text encoder", "bert"): {"pretrained": "$BERT"},
    ("text encoder", "bigru"): {"word_dim": 6},
    ("text encoder", "dive-bert"): {"pretrained": "$BERT", "heads": 2, "head_dim": 4, "depth": 2},
    ("text encoder", "dive-gru"): {"word_dim": 6, "heads": 2, "head_dim": 4, "depth": 2},
    ("text encoder", "dual"): {"pretrained": "$CLIP", "projection": "new"},
    ("text encoder", "gru"): {"word_dim": 6},
    ("text encoder", "uniter-bert"): {"pretrained": "$BERT"},
    ("matcher", "gsmn"): {"blocks": 4, "kernels": 3, "hidden": 6},
    ("matcher", "naaf"): {"min_samples": 4, "adjust_epoch": 1},
    ("matcher", "naaf-reference"): {"min_samples": 4},
    ("matcher", "saf"): {"sim_dim": 8},
    ("matcher", "sgr"): {"sim_dim": 8},
    ("matcher", "sgraf"): {"sim_dim": 8},
    ("matcher", "uniter"): {"layers": 1, "heads": 2, "ffn": 24},
    ("objective", "aoq"): {"first": "$VSE", "candidates": 4},
    ("objective", "captioning"): {"hidden": 8, "word_dim": 6},
    ("objective", "hard-candidates"): {"kept": 2},
    ("objective", "hrem-graph"): {"warmup": 0, "heads": 2, "topk": 3},
    ("objective", "lseh"): {"dim": 6},
    ("objective", "meta-spn"): {"hidden": 8, "meta_share": 0.3},
    ("objective", "ndgl"): {"guide": "$GUIDE0"},
    ("objective", "tags"): {"masks": 3, "samples": 3, "kept": 4, "rank": 1.0},
    ("objective", "tags-dc"): {"masks": 3, "samples": 3, "kept": 4, "rank": 1.0},
    ("protection", "protect"): {"dim": 4},
    ("extractor", "crops"): {"base": "transformers", "base_options": {"model": "$VIT"}},
    ("extractor", "efficientnet-lite"): {"size": 32},
    ("extractor", "joined"): {"parts": ["transformers:$VIT", "transformers:$DINO"]},
    ("extractor", "pixels"): {"model": "$CLIP"},
    ("extractor", "segments"): {"max_fragments": 6, "side": 48},
    ("extractor", "transformers"): {"model": "$VIT"},
}
"""Small sizes and what an entry cannot do without; ``$NAME`` is a folder of `folders`."""


@dataclass(frozen=True)
class Together:
    """An option that is seen only beside others, or whose values its type does not tell."""

    why: str
    values: list[Any] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)


NEW_POOLINGS = Together("a name or options", [{"name": "kmax", "k": 2}, "max"])
BERTS = Together("a folder", ["$BERT2"])
HEADS = Together("heads divide the width", [2])
MEAN = Together("the default is the form's own, a sum", ["mean"])
REFERENCE = Together("read by this form only", base={"form": "reference"})
FOLDER, SEQUENCE = "a folder", "a list"

ANY: dict[tuple[str, str], Together] = {
    ("image encoder", "pooling"): NEW_POOLINGS,
    ("text encoder", "pooling"): NEW_POOLINGS,
    ("text encoder", "glove"): Together("a file", ["$GLOVE"]),
    ("text encoder", "pretrained"): BERTS,
    ("image encoder", "layer_decay"): Together("a decay is at most 1", [0.5]),
    ("text encoder", "layer_decay"): Together("a decay is at most 1", [0.5]),
    ("image encoder", "freeze"): Together("the network has two layers", [1, -1]),
    ("text encoder", "freeze"): Together("the network has two layers", [1, -1]),
    ("matcher", "slots"): Together("read by this form only", [20], {"form": "reference"}),
    ("objective", "extractor"): Together("the other one is an optional package", ["nobody"]),
    ("objective", "generator"): Together(FOLDER, ["$CROSS"]),
    ("objective", "judge"): Together(FOLDER, ["$CROSS"]),
    ("objective", "source"): Together("rules, a file or a run", ["rules:swap", "$CROSS"]),
}
"""For every entry of a kind that has the option."""

PIXELS = {"model": "", "size": 16, "patch": 8, "fit": "crop"}
SMALL_DETR = {"model": "$DETR", "size": 32}
OWN_SPACE = {"pretrained": "$SIGLIP", "projection": "own"}
TOGETHER: dict[tuple[str, str, str], Together] = {
    ("pooling", "relations", "heads"): HEADS,
    ("pooling", "relations", "form"): Together("differs for items of fewer than k", base={"k": 5}),
    ("image encoder", "self-attention", "heads"): HEADS,
    ("image encoder", "transformer", "heads"): HEADS,
    ("image encoder", "dual", "pretrained"): Together(FOLDER, ["$SIGLIP"]),
    ("image encoder", "dual", "size"): Together("a multiple of the patch", [32]),
    ("image encoder", "dual", "projection"): Together("own needs its width", ["new"], OWN_SPACE),
    ("text encoder", "dual", "pretrained"): Together(FOLDER, ["$SIGLIP"]),
    ("text encoder", "dual", "projection"): Together("own needs its width", ["new"], OWN_SPACE),
    ("text encoder", "uniter-bert", "positions"): Together(
        "BERT's weights bring their own", base={"weights": False}
    ),
    ("matcher", "chan", "alpha"): Together("read by soft coding only", base={"coding": "vsa"}),
    ("matcher", "gsmn", "parser"): Together(
        "read by sparse graphs only", ["spacy"], {"graph": "sparse"}
    ),
    ("matcher", "naaf", "mining"): Together(
        "refuses what mining reads", base={"adjust_epoch": 15, "min_samples": 200}
    ),
    ("matcher", "naaf", "min_samples"): Together("beyond a batch", [40]),
    ("matcher", "naaf-reference", "mining"): Together(
        "refuses what mining reads", base={"min_samples": 200}
    ),
    ("matcher", "naaf-reference", "min_samples"): Together("beyond a batch", [400]),
    ("matcher", "uniter", "pretrained"): Together(FOLDER, ["$BERT"], {"layers": 2}),
    ("matcher", "uniter", "extras"): Together(SEQUENCE, [["mlm"], ["itm"]], {"vocabulary": 20}),
    ("matcher", "uniter", "vocabulary"): Together(
        "read by heads that write", base={"extras": ["mlm"], "vocabulary": 20}
    ),
    ("objective", "alignment", "match"): Together("of the negatives kept", base={"kept": 2}),
    ("objective", "alignment", "alone"): Together("of the negatives kept", [1], {"kept": 2}),
    ("objective", "aoq", "first"): Together(FOLDER, ["$VSE2"]),
    ("objective", "captioning", "max_len"): Together("captions are short", [3]),
    ("objective", "cfm", "adjust"): Together("a chance", [1.0]),
    ("objective", "cfm", "explore"): Together("a chance", [1.0]),
    ("objective", "cfm", "exchange_regions"): Together("if adjusted", [0.3], {"adjust": 1.0}),
    ("objective", "cfm", "exchange_words"): Together("if adjusted", [0.3], {"adjust": 1.0}),
    ("objective", "cfm", "mask_regions"): Together("if explored", [0.6], {"explore": 1.0}),
    ("objective", "cfm", "mask_words"): Together("if explored", [0.6], {"explore": 1.0}),
    ("objective", "distance-weighted", "dimension"): Together("odds of a draw", [3]),
    ("objective", "distance-weighted", "cut_off"): Together("odds of a draw", [1.4]),
    ("objective", "ce-clip", "max_threshold"): Together(
        "a gap of scaled scores", [1e-3], {"source": "rules:relation"}
    ),
    ("objective", "triplet-clip", "source"): Together("a swap has none", ["rules:noun", "$CROSS"]),
    ("objective", "fsc-clip", "smoothing"): Together("a share", [0.3]),
    ("objective", "triplet-clip", "images"): Together("a folder of the retriever", ["$VSE"]),
    ("objective", "foils", "hardest"): Together("of several foils", base={"count": 3}),
    ("objective", "hrem-graph", "nonzero_cut_off"): Together("a distance is at most 2", [0.5]),
    ("objective", "lseh", "form"): Together("seldom the hardest", base={"hardest": False}),
    ("objective", "ndgl", "guide"): Together(FOLDER, ["$GUIDE1"]),
    ("objective", "sct", "temperature"): REFERENCE,
    ("objective", "sct", "hard_similarity"): Together(
        "read by this form only", [0.3], {"form": "reference"}
    ),
    ("objective", "sct", "reduction"): MEAN,
    ("objective", "selhn", "epsilon"): Together("a gap between scores", [0.3]),
    ("objective", "shn", "temperature"): REFERENCE,
    ("objective", "shn", "reduction"): MEAN,
    ("objective", "ncr", "threshold"): Together("of a chance to be clean", [0.001]),
    ("objective", "ssp", "margin"): Together("only says which anchors count", [0.8]),
    ("objective", "ssp", "positive"): Together(SEQUENCE, [[0.1, 0.2, 0.5]]),
    ("objective", "ssp", "negative"): Together(SEQUENCE, [[0.5, 0.1, 0.3]]),
    ("objective", "vse-c", "kinds"): Together(SEQUENCE, [["swap"]]),
    ("protection", "protect", "teacher"): Together(FOLDER, ["$VSE"]),
    ("protection", "protect", "slack"): Together("of a teacher", [0.3], {"teacher": "$VSE"}),
    ("protection", "protect", "above"): Together("of a teacher", [0.0], {"teacher": "$VSE"}),
    ("protection", "protect", "dim"): Together("of captions' vectors", [2], {"captions": 0.8}),
    ("extractor", "crops", "base"): Together(
        "a backbone", ["transformers:$DINO"], {"base": "transformers:$VIT", "base_options": {}}
    ),
    ("extractor", "crops", "base_options"): Together("a mapping", [{"model": "$DINO"}]),
    ("extractor", "crops", "scales"): Together(SEQUENCE, [[1.0, 0.7]]),
    ("extractor", "efficientnet-lite", "fit"): Together("one of them needs it", base={"grid": 2}),
    ("extractor", "joined", "parts"): Together(
        SEQUENCE, [["transformers:$DINO", "transformers:$VIT"]]
    ),
    ("extractor", "pixels", "model"): Together(FOLDER, ["$SIGLIP"]),
    ("extractor", "pixels", "size"): Together("a multiple of the patch", [32]),
    ("extractor", "pixels", "fit"): Together("its own is to crop", ["squash"]),
    ("extractor", "pixels", "resized"): Together("before a crop", [24]),
    ("extractor", "pixels", "filter"): Together("Pillow's number", [0]),
    ("extractor", "segments", "least_share"): Together("regions are large", [0.1]),
    ("extractor", "transformers", "model"): Together(FOLDER, ["$DINO"]),
    ("extractor", "transformers", "kind"): Together("a detector", ["grid"], SMALL_DETR),
    ("extractor", "transformers", "top"): Together("a detector", [3], SMALL_DETR),
    ("extractor", "transformers", "size"): Together("a multiple of the patch", [48]),
}
"""For one entry."""

NO_EFFECT: dict[tuple[str, str, str], str] = {
    ("image encoder", "dual", "checkpointing"): "memory against time",
    ("text encoder", "dual", "checkpointing"): "memory against time",
    ("matcher", "uniter", "checkpointing"): "memory against time",
    ("extractor", "efficientnet-lite", "batch_size"): "memory against time",
    ("extractor", "transformers", "batch_size"): "memory against time",
}
"""Options that change no result, each with what it is there for instead."""

ELSEWHERE = {
    "timm": "an optional package; tests/features/test_timm_models.py",
    "onnx": "an optional package; tests/features/test_onnx_models.py",
}
"""Extractors whose options are tested where their networks are made."""

OTHER_KINDS = {
    "model": "no options: a composition of parts",
    "importer": "no options: a checkpoint says them",
    "data source": "tests/data",
    "named data set": "tests/data/scenes/test_scenes.py",
    "conversion target": "tests/data/test_convert.py",
    "search backend": "optional packages; tests/search/backends/test_backends.py",
}
"""Kinds of parts whose options are not tried here."""
