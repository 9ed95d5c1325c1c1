"""The cross-attention family: words and regions, compared pair by pair."""

from __future__ import annotations

from typing import Any

from counterfoil.models.spec import ModelSpec, models


def _local(matcher: dict[str, Any], image: str = "fc", text: str = "bigru") -> ModelSpec:
    """Unpooled encoders, the SCAN family's unless said otherwise, and a matcher of fragments."""
    return ModelSpec(
        image={"name": image, "pooling": "none"},
        text={"name": text, "pooling": "none"},
        matcher=matcher,
    )


@models.register("scan-t2i")
def scan_t2i() -> ModelSpec:
    """SCAN text-to-image: words attend to regions (Lee et al. 2018)."""
    return _local({"name": "scan-t2i"})


@models.register("scan-i2t")
def scan_i2t() -> ModelSpec:
    """SCAN image-to-text: regions attend to words (Lee et al. 2018)."""
    return _local({"name": "scan-i2t"})


@models.register("scan")
def scan() -> ModelSpec:
    """SCAN in both directions at once, on one pair of encoders (Lee et al. 2018)."""
    return _local({"name": "scan"})


@models.register("bfan")
def bfan() -> ModelSpec:
    """BFAN-equal: attention to relevant fragments only, both directions (Liu et al. 2019)."""
    return _local({"name": "bfan", "focal": "equal"})


@models.register("bfan-prob")
def bfan_prob() -> ModelSpec:
    """BFAN-prob: the same, fragments judged by their confidence (Liu et al. 2019)."""
    return _local({"name": "bfan", "focal": "prob"})


@models.register("chan")
def chan() -> ModelSpec:
    """CHAN with BiGRU: regions see each other, each word takes its best one (Pan et al. 2023)."""
    return _local({"name": "chan", "coding": "vha", "pooling": "lse"}, image="self-attention")


@models.register("chan-bert")
def chan_bert() -> ModelSpec:
    """CHAN with BERT: linear projection, mean of the words' best regions (Pan et al. 2023)."""
    return _local({"name": "chan", "coding": "vha", "pooling": "mean"}, text="bert")


@models.register("imram")
def imram() -> ModelSpec:
    """IMRAM: three steps of attention with a memory, both directions (Chen et al. 2020)."""
    return _local({"name": "imram"})
