"""Stems of English words by Porter's algorithm (1980), from Snowball."""

from __future__ import annotations

from functools import lru_cache

import snowballstemmer

_PORTER = snowballstemmer.stemmer("porter")


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """The stem of a lower-case word; words of one or two letters are left alone, as by Porter.

    >>> [stem(word) for word in ("riding", "rides", "ponies", "happily", "is")]
    ['ride', 'ride', 'poni', 'happili', 'is']
    """
    if len(word) <= 2:
        return word
    stemmed: str = _PORTER.stemWord(word)
    return stemmed
