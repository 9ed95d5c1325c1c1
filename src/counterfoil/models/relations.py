"""Models of relations: fragments that see each other, and instances that do in training."""

from __future__ import annotations

from typing import Any

from counterfoil.models.spec import ModelSpec, models


def _related(text: str) -> ModelSpec:
    """HREM's encoders; its graph of instances is in the objective 'hrem-graph'."""
    pooling: dict[str, Any] = {"name": "relations", "dropout": 0.1}
    return ModelSpec(
        image={"name": "mlp", "residual": "raw", "pooling": pooling},
        text={"name": text, "pooling": pooling},
        matcher={"name": "cosine"},
    )


@models.register("hrem")
def hrem() -> ModelSpec:
    """HREM with BiGRU: pooling with fragment relations, on both sides (Fu et al. 2023)."""
    return _related("bigru")


@models.register("hrem-bert")
def hrem_bert() -> ModelSpec:
    """HREM with BERT: the same over the states of a language model (Fu et al. 2023)."""
    return _related("bert")
