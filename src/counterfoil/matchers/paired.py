"""Each image with its own text, and with no other."""

from __future__ import annotations

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
    block = max(1, len(images)) if matcher.needs == "pooled" else PAIRED_BLOCK
    places = torch.arange(len(images), device=images.mask.device).split(block)
    return torch.cat([matcher(images[at], texts[at]).diagonal() for at in places])
