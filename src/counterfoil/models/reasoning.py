"""Semantic reasoning: fragments related to each other before a GRU reads them."""

from __future__ import annotations

from typing import Any

from counterfoil.models.spec import ModelSpec, models


def _reasoning(text: dict[str, Any]) -> ModelSpec:
    return ModelSpec(image={"name": "vsrn"}, text=text, matcher={"name": "cosine"})


def _reasoned_words(name: str) -> dict[str, Any]:
    return {"name": name, "pooling": {"name": "reasoning", "readout": "gru"}}


@models.register("vsrn")
def vsrn() -> ModelSpec:
    """VSRN: region graph and GRU, last state of a GRU over words (Li et al. 2019)."""
    return _reasoning({"name": "gru"})


@models.register("vsrn++")
def vsrn_pp() -> ModelSpec:
    """VSRN++ on BiGRU words: the same reasoning on both sides, without a language model."""
    return _reasoning(_reasoned_words("bigru"))


@models.register("vsrn++-bert")
def vsrn_pp_bert() -> ModelSpec:
    """VSRN++: the same reasoning on both sides, over the words of BERT (Li et al. 2022)."""
    return _reasoning(_reasoned_words("bert"))
