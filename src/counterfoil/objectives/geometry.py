"""Distances between points, with gradients that stay finite where points coincide."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Euclidean distances [X, Y], or [X, X] of points with each other.

    Computed from inner products. What is lost to rounding there counts as distance zero, and a
    distance of zero has no gradient: a point is not moved by itself or by its double.
    """
    other = x if y is None else y
    squares = x.square().sum(-1)[:, None] + other.square().sum(-1)[None]
    squared = squares - 2 * x @ other.T
    same = squared.detach() <= 16 * torch.finfo(x.dtype).eps * squares.detach()
    if y is None:
        same = same | torch.eye(len(x), dtype=torch.bool, device=x.device)
    return squared.masked_fill(same, 1.0).sqrt().masked_fill(same, 0.0)
