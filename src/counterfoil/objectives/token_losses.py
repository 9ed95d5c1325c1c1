"""Losses of single words: filling masks, telling replaced words, correcting them (TAGS).

All are unreduced, one number a word, so that their mean over any set of words is the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

UNLABELLED = -1
"""The label of a token that no loss looks at."""

CLASS_WEIGHTS = (1.0, 0.11)
"""TAGS' weights of replaced and of original words, of which there are many more."""


def word_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy at each labelled token, in order: of a masked language model, of corrections.

    ``logits`` [..., V], ``labels`` [...] with −1 where there is nothing to say.

    >>> word_losses(torch.zeros(1, 2, 4), torch.tensor([[-1, 3]]))
    tensor([1.3863])
    """
    asked = labels != UNLABELLED
    return F.cross_entropy(logits[asked], labels[asked], reduction="none")


def discrimination_losses(
    logits: Tensor,
    ids: Tensor,
    true_ids: Tensor,
    mask: Tensor,
    weights: tuple[float, float] = CLASS_WEIGHTS,
) -> Tensor:
    """Weighted negative log-likelihood of "replaced" or "original" at each real token, in order.

    ``logits`` [n, W, 2]; a token of ``ids`` [n, W] is original where it is that of ``true_ids``.
    Weights scale the losses; their mean is over tokens, not over weights, as TAGS takes it.
    """
    original = (ids == true_ids).expand(mask.shape)[mask]
    losses = F.cross_entropy(logits[mask], original.long(), reduction="none")
    replaced_weight, original_weight = weights
    return losses * torch.where(original, original_weight, replaced_weight)
