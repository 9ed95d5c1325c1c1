"""How matchers score pairs: PyTorch's tiled path, and Triton kernels behind one dispatcher."""

from counterfoil.kernels.attention import (
    attended_cosine,
    context_norms,
    gram,
    l2_over,
    leaky,
    masked_softmax,
    similarities,
)
from counterfoil.kernels.tiled import TilePlan, plan_tiles

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
