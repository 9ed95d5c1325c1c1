"""Cross-encoders: a pair goes through one transformer, from which more than a score is read."""

from __future__ import annotations

from collections.abc import Sequence

from counterfoil.errors import ConfigError
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.cross_heads import Head
from counterfoil.models.model import Model
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


def add_heads(model: Model, extras: Sequence[Head]) -> None:
    """Give a model's cross-encoder further heads, in place; its spec, so its folder, has them too.

    To be done before an optimiser is made of its parameters.
    """
    matcher = model.matcher
    if not isinstance(matcher, CrossEncoder):
        raise ConfigError(
            f"the model '{model.spec.name}' reads words and regions apart; only a cross-encoder "
            "(uniter-small, uniter-base, uniter-large) has heads over both"
        )
    matcher.heads.add(extras, len(model.text))
    options = {
        **model.spec.matcher,
        "extras": [name for name in matcher.heads if name != "rank"],
        "vocabulary": len(model.text),
    }
    model.spec = model.spec.model_copy(update={"matcher": options})
