"""The fast paths of the matchers: the Gram identity in PyTorch, the tile planner."""

from counterfoil.kernels.attention import (
    attended_cosine,
    context_norms,
    gram,
    l2_over,
    leaky,
    masked_softmax,
    similarities,
)
from counterfoil.kernels.tiles import TilePlan, plan_tiles

__all__ = [
    "TilePlan",
    "attended_cosine",
    "context_norms",
    "gram",
    "l2_over",
    "leaky",
    "masked_softmax",
    "plan_tiles",
    "similarities",
]
