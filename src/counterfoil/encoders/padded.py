"""A recurrent network over padded sequences: what is launched depends on shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Weights = Sequence[Sequence[Tensor]]
"""As `nn.GRU.all_weights` has them: of each layer, and in it of each direction."""


def run_padded(weights: Weights, both_ways: bool, inputs: Tensor, lengths: Tensor) -> Tensor:
    """States [B, W, directions·H] of a GRU over inputs [B, W, D]; zero beyond ``lengths`` [B].

    The way back begins at the last word of each sequence, which is mirrored for it, and goes on
    into the padding, where nobody looks.
    """
    place = torch.arange(inputs.shape[1], device=inputs.device)
    inside = place < lengths[:, None]
    mirror = torch.where(inside, lengths[:, None] - 1 - place, place)[..., None]
    outside = ~inside[..., None]
    states = inputs.masked_fill(outside, 0.0)
    directions = 2 if both_ways else 1
    for layer in range(0, len(weights), directions):
        ways = [_one_way(weights[layer], states)]
        if both_ways:
            ways.append(_turned(_one_way(weights[layer + 1], _turned(states, mirror)), mirror))
        states = torch.cat(ways, -1)
    return states.masked_fill(outside, 0.0)


def _turned(states: Tensor, mirror: Tensor) -> Tensor:
    return states.gather(1, mirror.expand(-1, -1, states.shape[2]))


def _one_way(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    start = inputs.new_zeros(1, len(inputs), weights[1].shape[1])
    biases = len(weights) > 2
    found: Tensor = torch._VF.gru(inputs, start, list(weights), biases, 1, 0.0, True, False, True)[
        0
    ]
    return found
