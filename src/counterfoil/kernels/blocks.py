"""What pairs are scored from: both sides of a block, its similarities, and a tile of them.

Names: Q asking items with N real fragments each (words, in text-to-image), C answering items with K
fragments each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What a few asking items and a few answering items are scored from.

    All asking items of a tile have the same number of fragments, so there is no padding on their
    side. ``answers`` [C, K] says which answering fragments are real; None: all of them. ``kin``
    are the inner products of an asking item's fragments with each other, where wanted.
    """

    sims_QNCK: Tensor
    norms_QN: Tensor
    gram_CKK: Tensor
    kin_QNN: Tensor | None
    answers_CK: Tensor | None


Score = Callable[[Tile], Tensor]


@dataclass(frozen=True)
class Span:
    """A tile's place: rows of packed fragments, asking items, answering items."""

    fragments: slice
    asking: slice
    length: int
    answering: slice


def spans(lengths: list[int], answering: int, fragments: int, cells: int) -> Iterator[Span]:
    """Tiles over asking items sorted by length; each holds items of one length."""
    start = 0
    item = 0
    while item < len(lengths):
        length = lengths[item]
        same = item
        while same < len(lengths) and lengths[same] == length:
            same += 1
        per_item = max(1, length) * fragments
        columns = max(1, min(answering, cells // per_item))
        rows = max(1, cells // (per_item * columns))
        for first in range(item, same, rows):
            last = min(first + rows, same)
            here = slice(start + (first - item) * length, start + (last - item) * length)
            for left in range(0, answering, columns):
                right = min(left + columns, answering)
                yield Span(here, slice(first, last), length, slice(left, right))
        start += (same - item) * length
        item = same


@dataclass(frozen=True)
class Block:
    """Packed similarities [ΣN, C, K] of asking items sorted by length, and both sides.

    ``norms`` [ΣN] are the lengths of the asking fragments; ``kin`` [Q, N, N], where wanted, is
    padded to the longest item.
    """

    sims: Tensor
    norms: Tensor
    gram: Tensor
    kin: Tensor | None
    answers: Tensor | None
    lengths: list[int]

    def tile(self, span: Span) -> Tile:
        n = span.length
        shape = (span.asking.stop - span.asking.start, n)
        sims = self.sims[span.fragments, span.answering]
        return Tile(
            sims.reshape(*shape, *sims.shape[1:]),
            self.norms[span.fragments].reshape(shape),
            self.gram[span.answering],
            self.kin[span.asking, :n, :n] if self.kin is not None else None,
            self.answers[span.answering] if self.answers is not None else None,
        )


@dataclass(frozen=True)
class Sides:
    """Both sides of a block: packed asking fragments [ΣN, D] with what `Block` says of them, and
    answering fragments [C, K, D] with their Gram matrices."""

    packed: Tensor
    norms: Tensor
    kin: Tensor | None
    v: Tensor
    gram: Tensor
    answers: Tensor | None
    lengths: list[int]

    def block(self) -> Block:
        sims = (self.packed @ self.v.flatten(0, 1).T).view(len(self.packed), *self.v.shape[:2])
        return Block(sims, self.norms, self.gram, self.kin, self.answers, self.lengths)
