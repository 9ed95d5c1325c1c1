"""Pairs as sequences for a cross-encoder: words, then regions, those of like length together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.transformer import Packing, select_rows
from counterfoil.matchers.fragment_matcher import fragments

MIN_GROUP_TOKENS = 1 << 14
"""Tokens of equally long sequences that are worth a pass by themselves.

Attention over them needs neither padding nor a mask, which a GPU's fastest kernels do not take;
below this, starting the kernels takes about as long as running them.
"""


@dataclass(frozen=True)
class PairTokens:
    """Tokens of all texts, then of all images, once each; a pair's sequence is read by index.

    ``tokens`` is [ΣW + ΣR, D], ``starts`` and ``lengths`` are those of each text and image in it.
    ``present`` [T, W] marks the words: those of the mask, and an empty first one in its place, so
    that there is one to be read.
    """

    tokens: Tensor
    text_starts: Tensor
    text_lengths: Tensor
    image_starts: Tensor
    image_lengths: Tensor
    present: Tensor

    @classmethod
    def of(cls, images: Encoded, texts: Encoded, dtype: torch.dtype | None = None) -> PairTokens:
        """Of two sides, in ``dtype`` or else in that of the texts."""
        present = texts.mask.clone()
        present[:, :1] = True
        words = _real(fragments(texts).masked_fill(~texts.mask[..., None], 0.0), present)
        regions = _real(fragments(images), images.mask)
        dtype = dtype or words.dtype
        counts = present.sum(1), images.mask.sum(1)
        starts = [count.cumsum(0) - count for count in counts]
        return cls(
            torch.cat([words.to(dtype), regions.to(dtype)]),
            starts[0],
            counts[0],
            starts[1] + len(words),
            counts[1],
            present,
        )

    def lengths(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Of the sequences [n] of images ``rows`` with texts ``columns``."""
        return self.text_lengths[columns] + self.image_lengths[rows]

    def sequences(self, rows: Tensor, columns: Tensor, length: int = 0) -> tuple[Tensor, Packing]:
        """Packed tokens [ΣL, D] of images ``rows`` with texts ``columns``.

        ``length`` is that of all, where the caller knows that they are equally long.
        """
        device, count = rows.device, len(rows)
        if length:
            packing = Packing.equal(count, length, device)
            pair = torch.arange(count, device=device).repeat_interleave(length)
        else:
            lengths = self.lengths(rows, columns)
            packing = Packing.of(lengths)
            pair = torch.arange(count, device=device).repeat_interleave(lengths)
        place = torch.arange(len(pair), device=device) - packing.starts[pair]
        words = self.text_lengths[columns]
        of_words = self.text_starts[columns][pair] + place
        of_regions = (self.image_starts[rows] - words)[pair] + place
        index = torch.where(place < words[pair], of_words, of_regions)
        return self.tokens.index_select(0, index), packing


def _real(x: Tensor, mask: Tensor) -> Tensor:
    """[B, N, D] as [Σ, D] of what the mask says is real."""
    return select_rows(x.flatten(0, 1), mask.flatten().nonzero()[:, 0])


@dataclass(frozen=True)
class Chunk:
    """Sequences [n], as indices, that go through together; ``length`` is 0 where it differs."""

    at: Tensor
    length: int


def chunks(lengths: Tensor, most: int, most_sequences: int) -> list[Chunk]:
    """All sequences in chunks of up to ``most`` tokens, padding counted, the shortest first.

    Where there are enough of a length they are by themselves, elsewhere with the next longer.
    """
    order = lengths.argsort(stable=True)
    spans: list[tuple[int, int, int]] = []
    start = stop = 0  # of a chunk of unlike lengths, not yet closed
    for length, count in enumerate(lengths.bincount().tolist()):
        if not count:
            continue
        room = max(1, min(most // length, most_sequences))
        alone = count * length >= MIN_GROUP_TOKENS or count > room
        if start < stop and (alone or stop + count - start > room):
            spans.append((start, stop, 0))
            start = stop
        stop += count
        if alone:
            size = -(-count // -(-count // room))  # as even as can be
            spans += [(at, min(at + size, stop), length) for at in range(start, stop, size)]
            start = stop
    if start < stop:
        spans.append((start, stop, 0))
    return [Chunk(order[left:right], length) for left, right, length in spans]
