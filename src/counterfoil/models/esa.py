"""ESA: embeddings pooled channel by channel (Zhu et al. 2023)."""

from __future__ import annotations

from typing import Any

from counterfoil.models.spec import ModelSpec, models


def _esa(text: dict[str, Any]) -> ModelSpec:
    """The image side of VSE∞, each channel attending to the regions by itself."""
    return ModelSpec(
        image={"name": "mlp", "residual": "raw", "pooling": "channel-attention"},
        text=text,
        matcher={"name": "cosine"},
    )


@models.register("esa")
def esa() -> ModelSpec:
    """ESA with BiGRU: projection plus MLP, attention per channel (Zhu et al. 2023)."""
    return _esa({"name": "bigru", "dropout": 0.1, "pooling": "channel-attention"})


@models.register("esa-bert")
def esa_bert() -> ModelSpec:
    """ESA with BERT: the same image side, a pretrained language model (Zhu et al. 2023)."""
    return _esa({"name": "bert", "pooling": {"name": "channel-attention", "dropout": 0.1}})
