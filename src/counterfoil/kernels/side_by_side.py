"""Captions of like length side by side, for a CPU: its vectors then run over captions or words.

Word j of caption q of a group stands at j · Q + q. Captions shorter than the longest of their group
are filled with zeros, which changes no similarity's length over words and weighs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LANES = 16
"""Captions to a vector; products, too, are faster where words are a multiple of it."""

MOST_WORDS, MOST_PADDING = 512, 1 / 8
"""A group ends before it has more words or a larger share of padding, once it fills its lanes."""


@dataclass(frozen=True)
class Group:
    """Which captions [Q], their words [N · Q, D], and which of these are real [N, Q]."""

    captions: Tensor
    words: Tensor
    real: Tensor

    @cached_property
    def norms(self) -> Tensor:
        return self.words.float().norm(dim=-1)

    @property
    def share(self) -> Tensor:
        """What each word counts in the mean over its caption [N, Q]."""
        return self.real / self.real.sum(0)

    def spread(self, scale: float) -> Tensor:
        """NAAF's eq. 9 [Q, N, N]: how much of the match of the last word reaches each other."""
        length, captions = self.real.shape
        of_caption = self.words.view(length, captions, -1).transpose(0, 1).float()
        logits = scale * (of_caption @ of_caption.transpose(1, 2))
        return logits.masked_fill_(~self.real.T[:, None, :], -torch.inf).softmax(-1)


def side_by_side(u: Tensor, mask: Tensor) -> Iterator[Group]:
    """Groups of captions [T, W, D]; those without words are in none."""
    lengths = mask.sum(1)
    order = lengths.argsort(stable=True)
    sizes = lengths[order].tolist()
    flat, places = u.flatten(0, 1), mask.flatten().nonzero()[:, 0]
    starts = lengths.cumsum(0) - lengths
    for first, last in groups(sizes):
        captions = order[first:last]
        within = torch.arange(sizes[last - 1])[:, None]
        real = within < lengths[captions]
        rows = (starts[captions] + within).clamp_(max=len(places) - 1)
        words = flat.index_select(0, places[rows.flatten()])
        if sizes[first] < sizes[last - 1]:
            words = words.mul_(real.flatten()[:, None])
        yield Group(captions, words, real)


def groups(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of captions sorted by length, of few words and little padding; empty ones left out.

    A run is of a multiple of `LANES` captions, but for the last.

    >>> list(groups([0] + 16 * [3] + 20 * [3] + 20 * [9]))
    [(1, 33), (33, 57)]
    """
    start = next((place for place, size in enumerate(sizes) if size), len(sizes))
    words = 0
    for place in range(start, len(sizes), LANES):
        more = sizes[place : place + LANES]
        count, size = place + len(more) - start, more[-1]
        uneven = size * count - words - sum(more) > MOST_PADDING * size * count
        if place > start and (size * count > MOST_WORDS or uneven):
            yield start, place
            start, words = place, 0
        words += sum(more)
    if start < len(sizes):
        yield start, len(sizes)
