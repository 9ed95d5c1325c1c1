"""Captions to lower-case word tokens, in the manner of the Penn Treebank.

The public vocabularies were built with a Treebank tokeniser, so words must be cut the same way for
their ids to be of use: contractions apart (``do n't``), hyphens kept, punctuation apart.
"""

from __future__ import annotations

import re
from pathlib import Path

MOST_WORDS, MOST_LETTERS = 200, 4000
"""Of a sentence that a person asks about; a caption has a dozen words, and time grows with them."""

STOP_WORDS = frozenset(
    word
    for line in (Path(__file__).parent / "stop_words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for word in line.split()
)
"""English words that say how a caption is built rather than what it shows."""

_CONTRACTION = re.compile(r"(?<=\w)(n't|'(?:s|re|ve|ll|d|m))\b")
_TOKEN = re.compile(
    r"""
      \.{2,} | --+                          # ellipsis, dash
    | ``|''                                 # quotes, once turned
    | n't\b | '(?:s|re|ve|ll|d|m)\b         # the second half of a contraction
    | (?:[^\W\d_]\.){2,}                    # u.s.
    | \w+(?:(?:[-/'.&]|[,:](?=\d))\w+)*     # words, t-shirt, and/or, 1,000, 5:30
    | [^\w\s]                               # any other sign by itself
    """,
    re.VERBOSE,
)


def words(caption: str) -> list[str]:
    """Tokens of a caption.

    >>> words("A man's dog doesn't chase the 3 T-shirts.")
    ['a', 'man', "'s", 'dog', 'does', "n't", 'chase', 'the', '3', 't-shirts', '.']
    """
    text = caption.lower().replace("’", "'").replace("‘", "'")
    text = re.sub(r'(^|[\s(\[{<])"', r"\1`` ", text).replace('"', " '' ")
    return _TOKEN.findall(_CONTRACTION.sub(r" \1", text))
