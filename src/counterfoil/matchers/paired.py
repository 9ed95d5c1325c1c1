"""Each image with its own text, and with no other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.base import Matcher

PAIRED_BLOCK = 16
"""Pairs scored together: a few that nobody asked for cost less than a call for each."""


def paired_scores(matcher: Matcher, images: Encoded, texts: Encoded) -> Tensor:
    """Scores [n] of image ``k`` with text ``k``: the matcher's own, or diagonals of blocks."""
    own = matcher.paired(images, texts)
    if own is not None:
        return own
    if matcher.needs == "pooled":
        return matcher(images, texts).diagonal()
    return block_diagonals(matcher, images, texts)


def block_diagonals(
    score: Callable[[Encoded, Encoded], Tensor], images: Encoded, texts: Encoded
) -> Tensor:
    """Scores [n] of image ``k`` with text ``k``, as diagonals of small blocks of all pairs."""
    places = torch.arange(len(images), device=images.mask.device).split(PAIRED_BLOCK)
    return torch.cat([score(images[at], texts[at]).diagonal() for at in places])
