"""Captions cut into tokens, and the noise that training puts on their words.

To cut a caption takes longer than all else that is done to it, and gives the same each time: so it
is apart from the noise, which differs from epoch to epoch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from counterfoil.data.parsing import Edge, LinkedIds
from counterfoil.errors import ConfigError


class WordNoise:
    """Caption augmentation of VSE∞: each word is, with ``rate``, masked, replaced or deleted.

    Of the touched words 50 % become the mask token, 10 % a random word and 40 % vanish.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self.rate = rate
        self.rng = rng

    def fates(self, count: int) -> list[str]:
        """For each of ``count`` words: keep, mask, replace or delete. At least one word stays."""
        rate, masked, replaced = self.rate, self.rate * 0.5, self.rate * 0.6
        fates = ["keep"] * count
        # for the dozen words of a caption, a loop is faster than arrays
        for place, draw in enumerate(self.rng.random(count).tolist()):
            if draw < rate:
                late = "replace" if draw < replaced else "delete"
                fates[place] = "mask" if draw < masked else late
        if count and fates.count("delete") == count:
            fates[0] = "keep"
        return fates


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A caption before anything is done to it; small, as training remembers many.

    ``word_of`` is which of its ``words`` is behind each id, None for a special token; None at all
    where a tokenizer cannot say. ``ends`` are those of the word graph's edges, one edge after the
    other.
    """

    ids: array[int]
    word_of: tuple[int | None, ...] | None
    words: int
    ends: array[int] | None

    @classmethod
    def of(
        cls,
        ids: Iterable[int],
        word_of: tuple[int | None, ...] | None,
        words: int,
        edges: Sequence[Edge] | None,
    ) -> Tokenised:
        ends = None if edges is None else array("i", chain.from_iterable(edges))
        return cls(array("i", ids), word_of, words, ends)

    def disturbed(self, noise: WordNoise | None, mask: int | None, size: int) -> list[int]:
        """The ids that noise leaves, never none; with their edges where the words have some.

        Whole words share one fate; special tokens are never touched. A masked token becomes
        ``mask`` (None: it stays), a replaced one any of ``size``.
        """
        ids: list[int] = self.ids.tolist()
        word_of: Sequence[int | None] = self.word_of or ()
        if noise is not None:
            left, words_left = self._after(noise, mask, size)
            ids, word_of = (left, words_left) if left else (ids, word_of)
        if self.ends is None:
            return ids
        edges = list(zip(self.ends[::2], self.ends[1::2], strict=True))
        return LinkedIds.of_words(ids, word_of, edges)

    def _after(
        self, noise: WordNoise, mask: int | None, size: int
    ) -> tuple[list[int], list[int | None]]:
        if self.word_of is None:
            raise ConfigError(
                "data.disturb_words: this tokenizer does not say which tokens make up a word: "
                "set it to 0"
            )
        fates = noise.fates(self.words)
        left: list[int] = []
        words_left: list[int | None] = []
        for token, word in zip(self.ids, self.word_of, strict=True):
            fate = "keep" if word is None else fates[word]
            if fate == "delete":
                continue
            if fate == "mask" and mask is not None:
                token = mask
            elif fate == "replace":
                token = int(noise.rng.integers(size))
            left.append(token)
            words_left.append(word)
        return left, words_left
