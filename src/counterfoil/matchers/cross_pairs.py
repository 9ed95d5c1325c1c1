"""Token sequences of pairs for a cross-encoder: words, then regions, batched by length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.transformer import Packing, select_rows
from counterfoil.matchers.fragment_matcher import fragments

MIN_GROUP_TOKENS = 1 << 14
"""Tokens of equally long sequences from which on they get a chunk of their own.

Attention over such a chunk needs neither padding nor a mask, which the fastest GPU kernels do not
support. With fewer tokens, kernel launches take about as long as the kernels.
"""


@dataclass(frozen=True)
class PairTokens:
    """Tokens of all texts, then of all images, stored once; a pair's sequence is gathered by index.

    ``tokens`` is [ΣW + ΣR, D]; ``starts`` and ``lengths`` locate each text and image in it.
    ``present`` [T, W] marks the words. Of a text without any, the first token is present, as zeros,
    so that every sequence has a token to read the score from.
    """

    tokens: Tensor
    text_starts: Tensor
    text_lengths: Tensor
    image_starts: Tensor
    image_lengths: Tensor
    present: Tensor

    @classmethod
    def of(cls, images: Encoded, texts: Encoded, dtype: torch.dtype | None = None) -> PairTokens:
        """Tokens of two sides, in ``dtype`` (default: that of the texts)."""
        present = texts.mask.clone()
        present[:, :1] |= ~texts.mask.any(1, keepdim=True)
        words = _pack(fragments(texts).masked_fill(~texts.mask[..., None], 0.0), present)
        regions = _pack(fragments(images), images.mask)
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
        """Lengths [n] of the sequences of images ``rows`` with texts ``columns``."""
        return self.text_lengths[columns] + self.image_lengths[rows]

    def sequences(self, rows: Tensor, columns: Tensor, length: int = 0) -> tuple[Tensor, Packing]:
        """Packed tokens [ΣL, D] of images ``rows`` with texts ``columns``.

        ``length``: the length of all sequences, if the caller knows that they are equally long.
        """
        device, count = rows.device, len(rows)
        if length:
            packing = Packing.equal(count, length, device)
            pair = torch.arange(count, device=device).repeat_interleave(length)
        else:
            lengths = self.lengths(rows, columns)
            packing = Packing.of(lengths)
            pair = torch.arange(count, device=device).repeat_interleave(lengths)
        position = torch.arange(len(pair), device=device) - packing.starts[pair]
        words = self.text_lengths[columns]
        word_index = self.text_starts[columns][pair] + position
        region_index = (self.image_starts[rows] - words)[pair] + position
        index = torch.where(position < words[pair], word_index, region_index)
        return self.tokens.index_select(0, index), packing


def _pack(x: Tensor, mask: Tensor) -> Tensor:
    """The real fragments [Σ, D] of [B, N, D]."""
    return select_rows(x.flatten(0, 1), mask.flatten().nonzero()[:, 0])


@dataclass(frozen=True)
class Chunk:
    """Indices [n] of sequences that are processed together; ``length`` is 0 if theirs differ."""

    index: Tensor
    length: int


def chunks(lengths: Tensor, max_tokens: int, max_sequences: int) -> list[Chunk]:
    """All sequences in chunks of up to ``max_tokens``, padding counted, the shortest first.

    Many sequences of one length get chunks of their own; few share one with the next longer.
    """
    order = lengths.argsort(stable=True)
    spans: list[tuple[int, int, int]] = []
    start = stop = 0  # the open chunk of mixed lengths
    for length, count in enumerate(lengths.bincount().tolist()):
        if not count:
            continue
        capacity = max(1, min(max_tokens // length, max_sequences))
        separate = count * length >= MIN_GROUP_TOKENS or count > capacity
        if start < stop and (separate or stop + count - start > capacity):
            spans.append((start, stop, 0))
            start = stop
        stop += count
        if separate:
            size = -(-count // -(-count // capacity))  # chunks of nearly equal size
            spans += [(left, min(left + size, stop), length) for left in range(start, stop, size)]
            start = stop
    if start < stop:
        spans.append((start, stop, 0))
    return [Chunk(order[left:right], length) for left, right, length in spans]
