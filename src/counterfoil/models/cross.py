"""Cross-encoders: a pair goes through one transformer, from which more than a score is read."""

from __future__ import annotations

from counterfoil.models.spec import ModelSpec, models


def _uniter(layers: int, width: int) -> ModelSpec:
    return ModelSpec(
        embed_size=width,
        image={"name": "uniter"},
        text={"name": "uniter"},
        matcher={"name": "uniter", "layers": layers},
    )


@models.register("uniter-small")
def uniter_small() -> ModelSpec:
    """UNITER, small: 4 layers, for embed_size 256; trains on two CPU cores."""
    return _uniter(4, 256)


@models.register("uniter-base")
def uniter_base() -> ModelSpec:
    """UNITER-base: 12 layers, for embed_size 768 (Chen et al. 2020)."""
    return _uniter(12, 768)


@models.register("uniter-large")
def uniter_large() -> ModelSpec:
    """UNITER-large: 24 layers, for embed_size 1024 (Chen et al. 2020)."""
    return _uniter(24, 1024)
