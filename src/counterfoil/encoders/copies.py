"""Several encoders of one kind side by side, as one encoder of as many times the width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.encoders.encoded import Encoded


class CopiedEncoder(nn.Module):
    """Every member encodes the same batch; their vectors stand one after another."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batch: Any) -> Encoded:
        parts: list[Encoded] = [member(batch) for member in self.members]
        return replace(
            parts[0],
            fragments=_side_by_side([part.fragments for part in parts]),
            pooled=_side_by_side([part.pooled for part in parts]),
            residuals=_side_by_side([part.residuals for part in parts]),
        )


def _side_by_side(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there, dim=-1) if len(there) == len(tensors) else None


def members_of(encoded: Encoded, count: int) -> list[Encoded]:
    """What each of ``count`` members encoded."""
    fragments = _apart(encoded.fragments, count)
    pooled = _apart(encoded.pooled, count)
    residuals = _apart(encoded.residuals, count)
    return [
        replace(encoded, fragments=fragments[k], pooled=pooled[k], residuals=residuals[k])
        for k in range(count)
    ]


def _apart(tensor: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if tensor is None else tensor.chunk(count, dim=-1)
