"""Counterfoil: match images with texts, and learn it from negatives.

>>> import counterfoil as cf
>>> pairs = cf.load_pairs("scenes", images=1000)            # doctest: +SKIP
>>> model = cf.create("rvse-mlp", pairs, embed_size=256)    # doctest: +SKIP
>>> run = cf.train(model, pairs, objective="hardest")       # doctest: +SKIP
>>> print(cf.evaluate(model, pairs.test).to_markdown())     # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterfoil.api import build_index, create, load_pairs, open_index, train
    from counterfoil.evaluation.evaluate import evaluate
    from counterfoil.models import from_pretrained, save_pretrained


__version__ = "0.1.0"

__all__ = [
    "build_index",
    "create",
    "evaluate",
    "from_pretrained",
    "load_pairs",
    "open_index",
    "save_pretrained",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load the API, and with it torch, when it is first used."""
    if name in __all__:
        from counterfoil import api

        return getattr(api, name)
    raise AttributeError(f"module 'counterfoil' has no attribute '{name}'")
