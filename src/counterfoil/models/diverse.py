"""Models of sets: several vectors an image, several a text, for what is ambiguous in them."""

from __future__ import annotations

from counterfoil.models.spec import ModelSpec, models


@models.register("dive")
def dive() -> ModelSpec:
    """DivE with BiGRU: sets predicted by slots, smooth-Chamfer similarity (Kim et al. 2023)."""
    return ModelSpec(
        image={"name": "dive"}, text={"name": "dive-gru"}, matcher={"name": "smooth-chamfer"}
    )


@models.register("dive-bert")
def dive_bert() -> ModelSpec:
    """DivE with BERT: the same, slots over the states of a language model (Kim et al. 2023)."""
    return ModelSpec(
        image={"name": "dive"}, text={"name": "dive-bert"}, matcher={"name": "smooth-chamfer"}
    )
