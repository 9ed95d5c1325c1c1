"""By what a model's pairs are scored, for those who wonder why it takes so long."""

from __future__ import annotations

from counterfoil.kernels.fused import without_kernels
from counterfoil.matchers.copies import CopiedMatcher
from counterfoil.matchers.similarity import SimilarityMatcher
from counterfoil.models.model import Model


def fallback(model: Model) -> str | None:
    """One line where PyTorch scores what a fused kernel could; None where there is no more to say.

    That is where the kernels do, and where there is none for the model's matcher.
    """
    matcher = model.matcher
    first = matcher.members[0] if isinstance(matcher, CopiedMatcher) else matcher
    if not isinstance(first, SimilarityMatcher) or not first.recipes():
        return None
    return without_kernels(model.device)
