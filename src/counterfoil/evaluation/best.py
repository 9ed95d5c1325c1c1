"""The best few of every row and column of a matrix that goes by tile by tile.

A score and the index of its candidate are packed into one integer whose order is that of the scores
and, among equal scores, of the lower index. So what is kept does not depend on the tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1
"""Stands at the end of a row where there are fewer candidates than were asked for."""

PAIRS = 1 << 22
"""Most pairs to offer at once: what ranks them takes several times the room of their scores."""

_LOW = (1 << 32) - 1
_EMPTY = -(1 << 63)


class BestBothWays:
    """The best ``k`` texts of each image and images of each text, of the tiles offered so far.

    Scores are compared in float32 and must be numbers.
    """

    def __init__(self, images: int, texts: int, k: int, device: torch.device) -> None:
        self._of_image = torch.full((images, k), _EMPTY, dtype=torch.long, device=device)
        self._of_text = torch.full((texts, k), _EMPTY, dtype=torch.long, device=device)
        self._ids = torch.arange(images, device=device)

    def offer(
        self, rows: slice, columns: Tensor, scores: Tensor, left_out: Tensor | None = None
    ) -> None:
        """Scores of images ``rows`` with texts ``columns``; pairs ``left_out`` do not count."""
        columns = columns.to(self._ids.device)
        by_image = _packed(scores, columns[None, :])
        by_text = _packed(scores, self._ids[rows, None])
        if left_out is not None:
            by_image.masked_fill_(left_out, _EMPTY)
            by_text.masked_fill_(left_out, _EMPTY)
        self._of_image[rows] = _merged(self._of_image[rows], by_image)
        self._of_text[columns] = _merged(self._of_text[columns], by_text.T)

    def images(self) -> tuple[Tensor, Tensor]:
        """Texts [I, k] of each image, best first, and their scores; `NOBODY`, −∞ at the end."""
        return _unpacked(self._of_image)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Images [T, k] of each text, likewise."""
        return _unpacked(self._of_text)


def _merged(best: Tensor, new: Tensor) -> Tensor:
    k = best.shape[1]
    return torch.cat([best, new.topk(min(k, new.shape[1]), 1).values], 1).topk(k, 1).values


def _packed(scores: Tensor, candidates: Tensor) -> Tensor:
    """One integer a score: its order in the high half, the candidate counted down in the low."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: no negative zero
    return (_ordered(bits).long() << 32) + (_LOW - candidates)


def _unpacked(best: Tensor) -> tuple[Tensor, Tensor]:
    scores = _ordered((best >> 32).int()).view(torch.float32)
    empty = best == _EMPTY
    return torch.where(empty, NOBODY, _LOW - (best & _LOW)), scores.masked_fill(empty, -torch.inf)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floats to integers in the same order; twice is the way back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
