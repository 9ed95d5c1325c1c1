"""`Encoded`: what every encoder returns, for images and for texts alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.collectives import gather_counts, gather_rows, world_size

Needs = Literal["pooled", "fragments", "both"]


@dataclass(frozen=True)
class Encoded:
    """Fragments [B, N, D] in the joint space, mask [B, N] (True: real), pooled [B, D] or None.

    Padded fragments are zero. A matcher of whole vectors keeps only ``pooled`` and the mask.
    """

    fragments: Tensor | None
    mask: Tensor
    pooled: Tensor | None = None

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def keep(self, needs: Needs) -> Encoded:
        """Drop what a matcher does not read, before it is stored or sent."""
        if needs == "pooled":
            return Encoded(None, self.mask[:, :0], self.pooled)
        return Encoded(self.fragments, self.mask, self.pooled if needs == "both" else None)

    def to(self, device: torch.device | str) -> Encoded:
        return Encoded(
            self.fragments.to(device) if self.fragments is not None else None,
            self.mask.to(device),
            self.pooled.to(device) if self.pooled is not None else None,
        )

    def __getitem__(self, rows: slice | Tensor) -> Encoded:
        return Encoded(
            self.fragments[rows] if self.fragments is not None else None,
            self.mask[rows],
            self.pooled[rows] if self.pooled is not None else None,
        )

    def pad_to(self, length: int) -> Encoded:
        """Append empty fragments up to ``length``."""
        missing = length - self.mask.shape[1]
        if missing <= 0:
            return self
        fragments = self.fragments
        if fragments is not None:
            fragments = F.pad(fragments, (0, 0, 0, missing))
        return Encoded(fragments, F.pad(self.mask, (0, missing)), self.pooled)

    @staticmethod
    def cat(parts: Sequence[Encoded]) -> Encoded:
        longest = max(part.mask.shape[1] for part in parts)
        padded = [part.pad_to(longest) for part in parts]
        fragments = [part.fragments for part in padded if part.fragments is not None]
        pooled = [part.pooled for part in padded if part.pooled is not None]
        return Encoded(
            torch.cat(fragments) if fragments else None,
            torch.cat([part.mask for part in padded]),
            torch.cat(pooled) if pooled else None,
        )

    def gather(self) -> Encoded:
        """The items of all processes, with gradients to the process each came from."""
        if world_size() == 1:
            return self
        lengths = gather_counts(self.mask.shape[1], self.mask.device)
        padded = self.pad_to(max(lengths))
        return Encoded(
            gather_rows(padded.fragments) if padded.fragments is not None else None,
            gather_rows(padded.mask),
            gather_rows(padded.pooled) if padded.pooled is not None else None,
        )


def l2_normalise(x: Tensor, eps: float = 1e-8) -> Tensor:
    """x / (‖x‖ + eps) over the last axis, as the public implementations do it."""
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + eps)
