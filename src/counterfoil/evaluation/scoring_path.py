"""Explains which scoring path is in use (fused kernel or PyTorch)."""

from __future__ import annotations

from counterfoil.kernels.spec import without_kernels
from counterfoil.kernels.triton.training import trainable
from counterfoil.matchers.copies import CopiedMatcher
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.models.model import Model


def fallback(model: Model, training: bool = False) -> str | None:
    """One line where PyTorch scores what a fused kernel could; None where there is no more to say.

    That is where the kernels do, and where there is none for the model's matcher. In ``training``
    a kernel has to have a backward pass, too.
    """
    matcher = model.matcher
    first = matcher.members[0] if isinstance(matcher, CopiedMatcher) else matcher
    if not isinstance(first, CrossAttentionMatcher) or not first.kernel_specs():
        return None
    line = without_kernels(model.device)
    if line is None and training and not all(trainable(spec) for spec in first.kernel_specs()):
        return "training by PyTorch: the fused kernel of this matcher has no backward pass"
    return line
