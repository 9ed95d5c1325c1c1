"""By what a model's pairs are scored, for those who wonder why it takes so long."""

from __future__ import annotations

from counterfoil.kernels.fused import without_kernels
from counterfoil.kernels.fused_training import trainable
from counterfoil.matchers.copies import CopiedMatcher
from counterfoil.matchers.similarity import SimilarityMatcher
from counterfoil.models.model import Model


def fallback(model: Model, training: bool = False) -> str | None:
    """One line where PyTorch scores what a fused kernel could; None where there is no more to say.

    That is where the kernels do, and where there is none for the model's matcher. In ``training``
    a kernel has to have a backward pass, too.
    """
    matcher = model.matcher
    first = matcher.members[0] if isinstance(matcher, CopiedMatcher) else matcher
    if not isinstance(first, SimilarityMatcher) or not first.recipes():
        return None
    line = without_kernels(model.device)
    if line is None and training and not all(trainable(recipe) for recipe in first.recipes()):
        return "training by PyTorch: the fused kernel of this matcher has no backward pass"
    return line
